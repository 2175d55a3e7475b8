//! How paths are shown.

use crate::output::PathForm;

// `-paths`.
#[derive(Debug, clap::Args)]
pub(crate) struct PathFlags {
    /// short, the unambiguous end of each path (default), or full
    #[arg(id = "paths", long = "paths", value_name = "FORM", value_parser = path_form)]
    form: Option<PathForm>,
}

impl PathFlags {
    pub(crate) fn is_given(&self) -> bool {
        self.form.is_some()
    }

    /// Refuses -paths if the answer has no paths: it has paths only with `flags`.
    pub(crate) fn refuse_without(&self, flags: &str, are_given: bool) -> Result<(), String> {
        if self.is_given() && !are_given {
            return Err(format!(
                "-paths needs {flags}: it says how files are shown in its lines"
            ));
        }
        Ok(())
    }

    pub(crate) fn form(&self) -> PathForm {
        self.form.unwrap_or_default()
    }
}

fn path_form(typed: &str) -> Result<PathForm, String> {
    match typed {
        "short" => Ok(PathForm::Short),
        "full" => Ok(PathForm::Full),
        _ => Err(format!(
            "\"{typed}\" is not a form of paths: there are short and full"
        )),
    }
}
