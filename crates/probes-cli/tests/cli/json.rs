//! docs/json.md is generated from docs/ocaml-probes.schema.json, and from the comments of the kinds of errors.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use regex::Regex;
use serde_json::{Map, Value};

use crate::support::schema::{assert_documented, schema};
use crate::support::{golden_file, object, run};

const INTRODUCTION: &str = "\
# JSON output

With `-json` (short for `-format json`), everything that `ocaml-probes` writes is JSON, one object on each line:

- The answer is on standard output, with `-o FILE` in a file, and with `trace` on standard error, because standard output is the
  program's.
- Errors (also wrong arguments), warnings, notes and, with `-v`, steps are on standard error. Help, and the screen of `top`, are text.

Each object has a `type` and a `version`, which is 1; neither is repeated in the tables below. Types, fields and kinds may be added, so
skip those that you do not know; none is renamed or removed while `version` is 1. A field that has no value is `null`, unless
its description says that it is absent. Addresses are strings, `0x` and hexadecimal digits.
In strings, control characters and others that a terminal would not show are escapes (`\\u009b`).
[ocaml-probes.schema.json](ocaml-probes.schema.json) says the same as a JSON Schema (draft 2020-12); every object that a test
sees is compared with it.

**With `trace`, the program may write to standard error, too.** Each of our objects is a whole line, written by one write(2), so
that another process's output comes before or after it. There are two exceptions. If the program has written a line without its end, our
object follows on that line. And a pipe keeps only writes of up to 4096 bytes together, pipe(7): a longer
object, for example `started` with many probes, may be split while the pipe is full. `-o FILE` keeps our objects apart.

This page is generated from the schema: `UPDATE_GOLDEN=1 cargo test -p probes-cli --test cli documents::` rewrites it.
";

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

fn definitions() -> Map<String, Value> {
    schema()["$defs"].as_object().unwrap().clone()
}

/// The names of the types, in the order of the schema.
fn types() -> Vec<String> {
    let schema = schema();
    let types = schema["oneOf"].as_array().unwrap().iter();
    types.map(referred).collect()
}

fn referred(reference: &Value) -> String {
    let path = reference["$ref"].as_str().unwrap();
    path.strip_prefix("#/$defs/").unwrap().to_owned()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("no text: {value}"))
}

/// What values a field has.
fn values(field: &Value) -> String {
    let word = |value: &Value| match value {
        Value::Null => "null".to_owned(),
        Value::String(text) => format!("`{text}`"),
        value => panic!("{value}"),
    };
    if let Some(words) = field["enum"].as_array() {
        return words.iter().map(word).collect::<Vec<_>>().join(", ");
    }
    if let Some(choices) = field["oneOf"].as_array() {
        return choices.iter().map(values).collect::<Vec<_>>().join(" or ");
    }
    if field["$ref"].is_string() {
        let name = referred(field);
        return format!("[{name}](#{name})");
    }
    match &field["type"] {
        Value::Array(types) => types.iter().map(text).collect::<Vec<_>>().join(" or "),
        name if name == "array" => format!("array of {}", values(&field["items"])),
        name => text(name).to_owned(),
    }
}

/// The fields of an object in their order, those that may be absent last.
fn fields(definition: &Value) -> Vec<String> {
    let required = definition["required"].as_array().unwrap().iter();
    let mut fields: Vec<String> = required.map(|field| text(field).to_owned()).collect();
    for field in definition["properties"].as_object().unwrap().keys() {
        if !fields.contains(field) {
            fields.push(field.clone());
        }
    }
    fields
}

/// An example with its fields in the order of its definition, in which the tool writes them.
fn in_order(example: &Value, definition: &Value) -> String {
    let referred_to = match definition["$ref"].as_str() {
        Some(_) => definitions()[&referred(definition)].clone(),
        None => definition.clone(),
    };
    let list = |parts: Vec<String>| parts.join(",");
    match example {
        Value::Array(items) => {
            let items = items.iter().map(|it| in_order(it, &referred_to["items"]));
            format!("[{}]", list(items.collect()))
        }
        Value::Object(values) if referred_to["properties"].is_object() => {
            let fields = fields(&referred_to).into_iter();
            let fields = fields.filter_map(|field| {
                let value = in_order(values.get(&field)?, &referred_to["properties"][&field]);
                Some(format!("\"{field}\":{value}"))
            });
            format!("{{{}}}", list(fields.collect()))
        }
        value => value.to_string(),
    }
}

fn section(name: &str, definition: &Value) -> String {
    let mut page = format!("\n### {name}\n\n{}\n", text(&definition["description"]));
    if let Some(choices) = definition["oneOf"].as_array() {
        page += "\n| value | meaning |\n|---|---|\n";
        for choice in choices {
            let value = match choice["properties"].as_object() {
                Some(fields) => {
                    let (kind, value) = fields.iter().next().unwrap();
                    let value = if value["oneOf"].is_array() {
                        "number or string".to_owned()
                    } else {
                        values(value)
                    };
                    format!("`{{\"{kind}\":`{value}`}}`")
                }
                None => format!("`{}`", choice["const"]),
            };
            writeln!(page, "| {value} | {} |", text(&choice["description"])).unwrap();
        }
        return page;
    }
    page += "\n| field | value | meaning |\n|---|---|---|\n";
    let is_type = definition["properties"]["type"]["const"].is_string();
    for field in fields(definition) {
        if is_type && ["type", "version"].contains(&&*field) {
            continue;
        }
        let value = &definition["properties"][&field];
        let meaning = text(&value["description"]);
        writeln!(page, "| `{field}` | {} | {meaning} |", values(value)).unwrap();
    }
    if let Some(examples) = definition["examples"].as_array() {
        for example in examples {
            let example = in_order(example, definition);
            write!(page, "\n```json\n{example}\n```\n").unwrap();
        }
    }
    page
}

/// The variants of an enum in a source file, in snake case, with the first sentence of the doc comment of each.
fn variants(file: &str, name: &str) -> Vec<(String, String)> {
    let source = fs::read_to_string(root().join(file)).unwrap();
    let (_, body) = source.split_once(&format!("enum {name} {{\n")).unwrap();
    let (body, _) = body.split_once("\n}\n").unwrap();
    let (mut found, mut comment) = (Vec::new(), String::new());
    let link = Regex::new(r"\[(`[^`]*`)\](\([^)]*\))?").unwrap();
    for line in body.lines() {
        let line = line.strip_prefix("    ").unwrap_or(line);
        if let Some(more) = line.strip_prefix("/// ") {
            comment += more;
            comment.push(' ');
        } else if line.starts_with(char::is_uppercase) {
            let end = line.find(|c: char| !c.is_alphanumeric());
            let mut snake = String::new();
            for letter in line[..end.unwrap_or(line.len())].chars() {
                if letter.is_uppercase() && !snake.is_empty() {
                    snake.push('_');
                }
                snake.extend(letter.to_lowercase());
            }
            let meaning = link.replace_all(&comment, "$1");
            let sentence = meaning.split_inclusive(". ").next().unwrap_or_default();
            found.push((snake, sentence.trim_end().to_owned()));
            comment.clear();
        }
    }
    assert!(!found.is_empty(), "no variants of {name}");
    found
}

/// All kinds of errors: those of the tool, then those of the library.
fn error_kinds() -> Vec<(String, String)> {
    let failures = variants("crates/probes-cli/src/failure.rs", "Failure").into_iter();
    // The errors of these two have the kinds of the library.
    let mut kinds: Vec<_> = failures
        .filter(|(kind, _)| !["target", "survey"].contains(&&**kind))
        .collect();
    for (area, _) in variants("crates/probes-lib/src/error.rs", "ErrorKind") {
        let words = area
            .split('_')
            .map(|word| word[..1].to_uppercase() + &word[1..]);
        let name = words.collect::<String>() + "Error";
        let file = format!("crates/probes-lib/src/error/{area}.rs");
        let of_area = variants(&file, &name).into_iter();
        kinds.extend(of_area.map(|(kind, meaning)| (format!("{area}.{kind}"), meaning)));
    }
    kinds
}

fn kind_table(kinds: &[(String, String)]) -> String {
    let mut table = "\n| kind | meaning |\n|---|---|\n".to_owned();
    for (kind, meaning) in kinds {
        writeln!(table, "| `{kind}` | {meaning} |").unwrap();
    }
    table
}

#[test]
fn page_is_generated_from_the_schema() {
    let (types, definitions) = (types(), definitions());
    let mut page = INTRODUCTION.to_owned();
    page += "\n## Types\n";
    for name in &types {
        page += &section(name, &definitions[name]);
    }
    page += "\n## Parts of objects\n";
    for (name, definition) in &definitions {
        if !types.contains(name) {
            page += &section(name, definition);
        }
    }
    page += "\n## Kinds of errors\n\nIn an area, such as `file`, *it* is the file, process, memory or program concerned.\n";
    page += &kind_table(&error_kinds());
    page += "\n## Kinds of warnings\n";
    let warnings = variants("crates/probes-cli/src/output/message.rs", "WarningKind");
    page += &kind_table(&warnings);
    golden_file(&root().join("docs/json.md"), &page);
}

#[test]
fn examples_of_the_page_are_documented() {
    let (types, definitions) = (types(), definitions());
    for name in types {
        let examples = definitions[&name]["examples"].as_array().unwrap();
        assert!(!examples.is_empty(), "{name}");
        for example in examples {
            assert_eq!(example["type"], *name);
            assert_documented(example);
        }
    }
}

#[test]
#[should_panic(expected = "not as docs/ocaml-probes.schema.json says")]
fn undocumented_fields_are_noticed() {
    let mut example = definitions()["info"]["examples"][0].clone();
    example["probes"][0]["sites"][0]["colour"] = "red".into();
    assert_documented(&example);
}

#[test]
fn kinds_of_errors_are_those_of_the_page() {
    let kinds = error_kinds();
    for (line, kind) in [
        ("info -json -pid 4194305", "process.not_found"),
        ("list -json -prog /nowhere/x", "file.open"),
        ("list -json -prog /dev/null", "file.elf"),
        ("trace -json -prog /nowhere/x", "launch.exec"),
        ("info -json -name nobody_has_this_name", "no_process_named"),
        ("ps -json -o /nowhere/x", "write_file"),
        ("ps -json -frobnicate", "usage"),
    ] {
        let run = run(line);
        let error = object(&run.stderr);
        assert_eq!(error["kind"], kind, "{line}");
        assert!(kinds.iter().any(|(known, _)| known == kind), "{kind}");
    }
}
