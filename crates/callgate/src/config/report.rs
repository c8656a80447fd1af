//! What is wrong in a file, as a compiler says it.

use std::ops::Range;

use annotate_snippets::{
    AnnotationKind, Group, Level, Origin, Renderer, Snippet, normalize_untrusted_str,
};

use crate::ConfigError;

/// So many problems are shown: nobody reads more before mending the first.
pub(super) const MOST: usize = 20;

/// One thing that is wrong, and where.
#[derive(Debug)]
pub(super) struct Problem {
    message: String,
    /// Bytes of the text; none where it is about the whole file.
    at: Option<Range<usize>>,
    label: String,
    beside: Option<(Range<usize>, &'static str)>,
    note: Option<String>,
}

impl Problem {
    /// Something about the whole file.
    pub(super) fn whole(message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            at: None,
            label: String::new(),
            beside: None,
            note: None,
        }
    }

    /// Something at one place, with a word under it that may be empty.
    pub(super) fn new(
        message: impl Into<String>,
        at: Range<usize>,
        label: impl Into<String>,
    ) -> Self {
        Self {
            at: Some(at),
            label: label.into(),
            ..Self::whole(message)
        }
    }

    /// Shows a second place.
    pub(super) fn beside(mut self, at: Range<usize>, label: &'static str) -> Self {
        self.beside = Some((at, label));
        self
    }

    /// Adds a line.
    pub(super) fn note(mut self, note: impl Into<String>) -> Self {
        self.note = Some(note.into());
        self
    }
}

/// The error of a file with these problems; `name` is the file's.
pub(super) fn report(name: &str, text: &str, mut problems: Vec<Problem>) -> ConfigError {
    problems.sort_by_key(|problem| problem.at.as_ref().map(|at| at.start));
    let name = normalize_untrusted_str(&harmless(name));
    let text = harmless(text);
    let shown = problems.iter().take(MOST);
    let mut said: Vec<String> = shown
        .map(|problem| Renderer::plain().render(&[group(&name, &text, problem)]))
        .collect();
    match problems.len().saturating_sub(MOST) {
        0 => {}
        1 => said.push("1 more problem is not shown".into()),
        more => said.push(format!("{more} more problems are not shown")),
    }
    ConfigError::file(said.join("\n\n"))
}

/// The text without the control characters beyond ASCII, which the renderer leaves alone. What takes their
/// place has two bytes, as they have.
fn harmless(text: &str) -> String {
    text.replace(|c: char| c.is_control() && !c.is_ascii(), "·")
}

fn group<'a>(name: &'a str, text: &'a str, problem: &'a Problem) -> Group<'a> {
    let title = Level::ERROR.primary_title(harmless(&problem.message));
    let Some(at) = &problem.at else {
        return title.element(Origin::path(name));
    };
    let label = Some(problem.label.as_str()).filter(|label| !label.is_empty());
    let mut snippet = Snippet::source(text)
        .path(name)
        .annotation(AnnotationKind::Primary.span(at.clone()).label(label));
    if let Some((at, label)) = &problem.beside {
        snippet = snippet.annotation(AnnotationKind::Context.span(at.clone()).label(*label));
    }
    let group = title.element(snippet);
    match &problem.note {
        Some(note) => group.element(Level::NOTE.message(note)),
        None => group,
    }
}
