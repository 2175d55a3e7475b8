//! JSON output, compared with docs/ocaml-probes.schema.json wherever a test reads it.

use std::sync::OnceLock;

use jsonschema::Validator;
use serde_json::Value;

/// The schema as users have it.
pub(crate) fn schema() -> Value {
    let text = include_str!("../../../../docs/ocaml-probes.schema.json");
    serde_json::from_str(text).unwrap()
}

/// A line of JSON output, with or without its end. It has to be as the schema says, with no other fields.
#[track_caller]
pub(crate) fn object(line: &str) -> Value {
    let object: Value = serde_json::from_str(line).unwrap_or_else(|_| panic!("not JSON: {line}"));
    assert_documented(&object);
    object
}

/// Asserts that an object is as the schema says, and has no other fields.
#[track_caller]
pub(crate) fn assert_documented(object: &Value) {
    static STRICT: OnceLock<Validator> = OnceLock::new();
    let strict = STRICT.get_or_init(|| validator(&schema()));
    if strict.is_valid(object) {
        return;
    }
    // The type alone, because the errors of a `oneOf` do not say what is wrong with it.
    let mut of_type = schema();
    let fields = of_type.as_object_mut().unwrap();
    fields.remove("oneOf");
    let name = object["type"].as_str().unwrap_or_default();
    fields.insert("$ref".to_owned(), format!("#/$defs/{name}").into());
    let errors: Vec<String> = match jsonschema::validator_for(&strictly(of_type)) {
        Ok(validator) => validator
            .iter_errors(object)
            .map(|error| format!("{}: {error}", error.instance_path()))
            .collect(),
        Err(_) => vec![format!("no type \"{name}\"")],
    };
    panic!("not as docs/ocaml-probes.schema.json says: {errors:#?}\n{object}");
}

fn validator(schema: &Value) -> Validator {
    let meta = jsonschema::meta::validate(schema).map_err(|error| error.to_string());
    assert_eq!(meta, Ok(()));
    jsonschema::validator_for(&strictly(schema.clone())).unwrap()
}

/// Returns the schema, forbidding the fields that it does not name. As published it allows them, because
/// later versions may have more.
fn strictly(mut schema: Value) -> Value {
    forbid_others(&mut schema);
    schema
}

fn forbid_others(part: &mut Value) {
    match part {
        Value::Object(fields) => {
            if fields.get("properties").is_some_and(Value::is_object) {
                fields.insert("additionalProperties".to_owned(), false.into());
            }
            fields.values_mut().for_each(forbid_others);
        }
        Value::Array(parts) => parts.iter_mut().for_each(forbid_others),
        _ => {}
    }
}
