//! Without the feature `trace`: no limiter has one, and what would ask for it is compiled away.

use crate::Call;

#[derive(Clone, Debug)]
pub(crate) enum Trace {}

#[derive(Debug)]
pub(crate) enum Traced {}

impl Trace {
    pub(crate) fn begin(&self, _: &Call<'_>) -> Traced {
        match *self {}
    }
}

impl Traced {
    pub(crate) fn waited(&mut self) {
        match *self {}
    }

    pub(crate) fn admitted(&mut self) {
        match *self {}
    }

    pub(crate) fn rejected(self) {
        match self {}
    }

    pub(crate) fn failed(self) {
        match self {}
    }
}
