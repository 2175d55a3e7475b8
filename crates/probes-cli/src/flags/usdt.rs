//! USDT probes of other providers as arguments: by globs for provider and name.

use probes_lib::{FunctionSelector, Generation, Glob};

use super::checked::each_once;

// Some USDT probes.
#[derive(Debug, clap::Args)]
pub(crate) struct UsdtFlags {
    /// Observe USDT probes of C and others: globs PROVIDER:NAME
    #[arg(id = "usdt", long, value_name = "GLOBS", value_delimiter = ',', value_parser = usdt)]
    globs: Vec<UsdtArgument>,
}

/// A glob for USDT probes, as it was typed and what that means.
#[derive(Clone, Debug)]
struct UsdtArgument {
    typed: String,
    glob: Glob,
}

impl UsdtFlags {
    /// The probes, each glob once.
    pub(crate) fn selectors(self) -> Result<Vec<FunctionSelector>, String> {
        let globs = self.globs.into_iter();
        let (typed, globs): (Vec<String>, Vec<Glob>) = globs.map(|it| (it.typed, it.glob)).unzip();
        each_once("-usdt", &typed)?;
        Ok(globs.into_iter().map(FunctionSelector::Usdt).collect())
    }
}

/// Reads a glob.
fn usdt(typed: &str) -> Result<UsdtArgument, String> {
    let typed = typed.trim();
    let Some((provider, name)) = typed.split_once(':') else {
        let why = "is not PROVIDER:NAME, such as postgresql:query__start";
        return Err(format!("\"{typed}\" {why}"));
    };
    if Generation::of_provider(provider.as_bytes()).is_some() {
        return Err(format!(
            "\"{typed}\" is a probe of OCaml: give -probe {name}"
        ));
    }
    let glob = typed.parse();
    let glob = glob.map_err(|error| format!("\"{typed}\" is {error}"))?;
    let typed = typed.to_owned();
    Ok(UsdtArgument { typed, glob })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usdt_probes_have_a_provider() {
        let found = usdt(" postgresql:query__* ").unwrap();
        assert_eq!(found.typed, "postgresql:query__*");
        assert!(found.glob.matches("postgresql:query__start"));
        for (typed, error) in [
            (
                "query",
                "\"query\" is not PROVIDER:NAME, such as postgresql:query__start",
            ),
            (
                "ocaml_2:tick",
                "\"ocaml_2:tick\" is a probe of OCaml: give -probe tick",
            ),
            ("a:[", "\"a:[\" is not a glob: it has a [ without a ]"),
        ] {
            assert_eq!(usdt(typed).err().as_deref(), Some(error));
        }
    }
}
