//! The JSON Schema of the file.

use serde_json::{Map, Value, json};

use super::{Key, Takes, allowed_in};
use crate::MAX_BURST;
use crate::rules::DEFAULT;

/// The JSON Schema (draft 2020-12) of a file of limits, for editors and other checkers.
///
/// What no schema can say, a reader still refuses: a burst that is not below its quota, a rate that is
/// out of range once its unit counts.
#[must_use]
pub fn schema() -> String {
    let schema = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "callgate limits",
        "description": "Limits of AI agents' tool calls.",
        "type": "object",
        "properties": {
            "dry_run": {
                "description": "Whether every call passes, and is only counted. False unless given.",
                "type": "boolean",
            },
            "limits": {
                "description": "Limits by name. A limit's name is its tool, or a pattern of tools, unless `tools` is given.",
                "type": "object",
                "propertyNames": { "$ref": "#/$defs/name" },
                "additionalProperties": limit(""),
                "minProperties": 1,
            },
            "default": limit(DEFAULT),
        },
        "additionalProperties": false,
        "anyOf": [{ "required": ["limits"] }, { "required": ["default"] }],
        "$defs": {
            "name": {
                "type": "string",
                "pattern": r"^[^\s\[\]{}]([^\[\]{}]*[^\s\[\]{}])?$",
            },
            "field": {
                "type": "string",
                "pattern": r"^\S(.*\S)?$",
                "not": { "enum": ["cost", "max_wait"] },
            },
        },
    });
    format!("{schema:#}\n")
}

fn limit(name: &str) -> Value {
    let keys = allowed_in(name).map(|key| (key.name.to_owned(), property(key)));
    json!({
        "description": if name == DEFAULT {
            "The limit of each tool that no other limit holds for; one bucket for each tool."
        } else {
            "A token bucket: how fast it refills, and how many tokens it holds."
        },
        "type": "object",
        "properties": keys.collect::<Map<_, _>>(),
        "additionalProperties": false,
        "oneOf": [
            { "required": ["requests_per_second", "burst"] },
            { "required": ["rate", "burst"] },
            {
                "required": ["quota"],
                "not": { "anyOf": [{ "required": ["requests_per_second"] }, { "required": ["rate"] }] },
            },
        ],
    })
}

fn property(key: &Key) -> Value {
    let mut property = match key.takes {
        Takes::Number => {
            json!({ "type": "number", "exclusiveMinimum": 0, "maximum": 1_000_000_000 })
        }
        Takes::Rate => {
            json!({ "type": "string", "pattern": r"^([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?/(s|min|h|day)$" })
        }
        Takes::Quota => {
            json!({ "type": "string", "pattern": "^0*([2-9]|[1-9][0-9]+)/(s|min|h|day)$" })
        }
        Takes::Whole => json!({ "type": "integer", "minimum": 1, "maximum": MAX_BURST }),
        Takes::Tools => {
            json!({ "type": "array", "items": { "$ref": "#/$defs/name" }, "minItems": 1 })
        }
        Takes::Fields => {
            json!({ "type": "array", "items": { "$ref": "#/$defs/field" }, "uniqueItems": true })
        }
    };
    property["description"] = key.means.into();
    property
}
