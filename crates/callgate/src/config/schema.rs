//! The JSON Schema of the file.

use serde_json::{Map, Value, json};

use super::{KEYS, Key, Takes, allowed_in};
use crate::rules::DEFAULT;
use crate::{MAX_BURST, OnStoreError};

/// The JSON Schema (draft 2020-12) of a file of limits, for editors and other checkers.
///
/// What no schema can say, a reader still refuses: a burst that is not below its quota, a rate or a time that
/// is out of range once its unit counts, a burst of `2.0`.
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
            "on_store_error": {
                "description": "What becomes of calls when a store over a network fails, unless their limits say it: a bucket of this process decides, they are refused, they pass, or they are refused with an error. 'local' unless given.",
                "enum": policies(),
            },
            "limits": {
                "description": "Limits by name. A limit's name is its tool, or a pattern of tools, unless `tools` is given.",
                "type": "object",
                "propertyNames": { "$ref": "#/$defs/name" },
                "additionalProperties": limit(""),
            },
            "default": limit(DEFAULT),
            "store": {
                "description": "Where the buckets are, for processes to share. Without it, each process has its own.",
                "type": "object",
                "properties": {
                    "url": {
                        "description": "The store's URL, such as 'shm:/run/myapp/callgate?slots=65536': a file in memory that the processes of this host share; or 'redis://127.0.0.1:6379/0?prefix=myapp', for any number of hosts.",
                        "type": "string",
                        "pattern": r"^(shm:/.*[^/]|(rediss?(\+sentinel)?|unix)://.*[?&]prefix=.+)$",
                    },
                    "url_env": {
                        "description": "The environment variable that has the URL.",
                        "type": "string",
                        "minLength": 1,
                    },
                },
                "additionalProperties": false,
                "oneOf": [{ "required": ["url"] }, { "required": ["url_env"] }],
            },
        },
        "additionalProperties": false,
        "anyOf": [
            { "required": ["limits"], "properties": { "limits": { "minProperties": 1 } } },
            { "required": ["default"] },
        ],
        "$defs": {
            "name": {
                "type": "string",
                "pattern": r"^[^\s\[\]{}]([^\[\]{}]*[^\s\[\]{}])?$",
            },
            "field": {
                "type": "string",
                "pattern": r"^\S([\s\S]*\S)?$",
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
        "oneOf": KEYS.iter().filter(|key| key.is_pace()).map(required).collect::<Value>(),
        "anyOf": [{ "required": ["burst"] }, { "required": ["quota"] }],
    })
}

/// A decimal above 0.
const DECIMAL: &str = r"(0*[1-9][0-9]*(\.[0-9]*)?|0*\.0*[1-9][0-9]*)(e[-+]?[0-9]+)?";

/// A time: a decimal and its unit, with no space between.
const TIME: &str = r"^([0-9]+(\.[0-9]*)?|\.[0-9]+)(ms|s|min|h)$";

const TWO_OR_MORE: &str = "0*([2-9]|[1-9][0-9]+)";

/// The pattern of a number and a unit with a slash between.
fn per_unit(number: &str) -> String {
    format!(r"^\s*{number}\s*/\s*(s|min|h|day)\s*$")
}

fn required(key: &Key) -> Value {
    json!({ "required": [key.name] })
}

fn policies() -> Value {
    OnStoreError::ALL
        .into_iter()
        .map(OnStoreError::name)
        .collect()
}

fn property(key: &Key) -> Value {
    let mut property = match key.takes {
        Takes::Number => {
            json!({ "type": "number", "exclusiveMinimum": 0, "maximum": 1_000_000_000 })
        }
        Takes::Rate => json!({ "type": "string", "pattern": per_unit(DECIMAL) }),
        Takes::Quota => json!({ "type": "string", "pattern": per_unit(TWO_OR_MORE) }),
        Takes::Whole => json!({ "type": "integer", "minimum": 1, "maximum": MAX_BURST }),
        Takes::Tools => {
            json!({ "type": "array", "items": { "$ref": "#/$defs/name" }, "minItems": 1, "uniqueItems": true })
        }
        Takes::Fields => {
            json!({ "type": "array", "items": { "$ref": "#/$defs/field" }, "uniqueItems": true })
        }
        Takes::Time => json!({ "type": "string", "pattern": TIME }),
        Takes::Policy => json!({ "enum": policies() }),
    };
    property["description"] = key.means.into();
    property
}
