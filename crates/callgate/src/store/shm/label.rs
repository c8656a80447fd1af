//! What people call a limit: its name and what splits it, for those who look into the file.

use std::sync::atomic::{AtomicU64, Ordering};

use super::file::LABEL;

/// The lengths of both texts come first, in a byte each.
const BYTES: usize = LABEL * 8;
const LONGEST_NAME: usize = 96;
const LONGEST_PER: usize = BYTES - LONGEST_NAME - 2;

/// Between fields; none has it in its name that people would write.
pub(super) const SEPARATOR: &str = "\u{1f}";

/// A name, and the fields that split the limit with separators between; long ones are cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Label {
    pub(super) name: String,
    pub(super) per: String,
}

impl Label {
    pub(super) fn new(name: &str, per: &[&str]) -> Self {
        Self {
            name: name.to_owned(),
            per: per.join(SEPARATOR),
        }
    }

    pub(super) fn write(&self, words: &[AtomicU64; LABEL]) {
        let (name, per) = (cut(&self.name, LONGEST_NAME), cut(&self.per, LONGEST_PER));
        let lengths = [name.len(), per.len()].map(|length| u8::try_from(length).unwrap_or(0));
        let mut bytes: Vec<u8> = [&lengths[..], name.as_bytes(), per.as_bytes()].concat();
        bytes.resize(BYTES, 0);
        for (word, bytes) in words.iter().zip(bytes.chunks_exact(8)) {
            let bytes = bytes.try_into().unwrap_or_default();
            word.store(u64::from_le_bytes(bytes), Ordering::Relaxed);
        }
    }

    /// Of any bytes: they are only shown.
    pub(super) fn read(words: &[u64; LABEL]) -> Self {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let [name, per] = [bytes[0], bytes[1]].map(usize::from);
        let text = |from: usize, length: usize| {
            let to = (from + length).min(BYTES);
            String::from_utf8_lossy(&bytes[from.min(to)..to]).into_owned()
        };
        Self {
            name: text(2, name),
            per: text(2 + name, per),
        }
    }
}

fn cut(text: &str, longest: usize) -> &str {
    let ends = text.char_indices().map(|(at, char)| at + char.len_utf8());
    let end = ends.take_while(|&end| end <= longest).last();
    &text[..end.unwrap_or(0)]
}
