//! Which fields of a hit are shown.

use strum::VariantArray;

use super::checked::{Flags, each_once};
use crate::failure::Failure;
use crate::output::{Field, Format};
use crate::usage::UsageError;

// The fields of a hit.
#[derive(Debug, clap::Args)]
pub(crate) struct FieldFlags {
    /// Columns of a hit: time,pid,thread,name,address,function,source,args
    #[arg(id = "fields", long, value_name = "FIELDS", value_delimiter = ',', value_parser = field)]
    chosen: Vec<Field>,
}

impl Flags for FieldFlags {
    /// `None`: all.
    type Value = Option<Vec<Field>>;

    fn check(self) -> Result<Option<Vec<Field>>, String> {
        each_once("-fields", &self.chosen)?;
        Ok((!self.chosen.is_empty()).then_some(self.chosen))
    }
}

/// Refuses chosen fields with JSON, whose objects have all fields.
pub(crate) fn refuse_fields_in_json(
    command: &'static str,
    fields: Option<&[Field]>,
    format: Format,
) -> Result<(), Failure> {
    if fields.is_some() && format == Format::Json {
        let why = "-fields and -json cannot be combined: an object has all fields";
        return Err(Failure::Usage(UsageError::new(Some(command), why)));
    }
    Ok(())
}

fn field(typed: &str) -> Result<Field, String> {
    let typed = typed.trim();
    typed.parse().map_err(|_| {
        let names: Vec<&str> = Field::VARIANTS.iter().map(<&str>::from).collect();
        format!("\"{typed}\" is not a field: there are {}", names.join(", "))
    })
}
