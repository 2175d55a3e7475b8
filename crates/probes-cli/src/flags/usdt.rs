//! USDT probes as arguments: globs for providers and names.

use probes_lib::{FunctionSelector, Generation, Glob};

use super::checked::each_once;

// USDT probes of other providers than OCaml's.
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
    /// Returns the selectors of the probes; refuses a glob that is given twice.
    pub(crate) fn selectors(self) -> Result<Vec<FunctionSelector>, String> {
        let globs = self.globs.into_iter();
        let (typed, globs): (Vec<String>, Vec<Glob>) = globs.map(|it| (it.typed, it.glob)).unzip();
        each_once("-usdt", &typed)?;
        Ok(globs.into_iter().map(FunctionSelector::Usdt).collect())
    }
}

/// The providers whose USDT probes are listed.
#[derive(Clone, Debug)]
pub(crate) struct ProviderArgument {
    /// `None` for all.
    pub(crate) glob: Option<Glob>,
}

/// Reads a glob for providers, or `any`.
pub(crate) fn provider(typed: &str) -> Result<ProviderArgument, String> {
    if typed == "any" {
        return Ok(ProviderArgument { glob: None });
    }
    if typed.is_empty() {
        return Err("a provider is empty".to_owned());
    }
    if let Some((provider, name)) = typed.split_once(':') {
        return Err(format!(
            "\"{typed}\" is not a provider: write -provider {provider} '{name}'"
        ));
    }
    let glob = glob(typed)?;
    Ok(ProviderArgument { glob: Some(glob) })
}

/// Reads a glob for names of USDT probes, without their providers.
pub(crate) fn usdt_name(typed: &str) -> Result<Glob, String> {
    if let Some((provider, name)) = typed.split_once(':') {
        return Err(format!(
            "\"{typed}\" has a provider: write -provider {provider} '{name}'"
        ));
    }
    glob(typed)
}

fn glob(typed: &str) -> Result<Glob, String> {
    let glob = typed.parse();
    glob.map_err(|error| format!("\"{typed}\" is {error}"))
}

/// Reads a glob `PROVIDER:NAME`; refuses the providers of OCaml.
fn usdt(typed: &str) -> Result<UsdtArgument, String> {
    let typed = typed.trim();
    let Some((provider, name)) = typed.split_once(':') else {
        let why = "is not PROVIDER:NAME, such as postgresql:query__start";
        return Err(format!("\"{typed}\" {why}"));
    };
    if Generation::of_provider(provider.as_bytes()).is_some() {
        return Err(format!(
            "\"{typed}\" is a probe of OCaml: other flags, such as -probe and -pair, take its name, {name}"
        ));
    }
    let glob = glob(typed)?;
    let typed = typed.to_owned();
    Ok(UsdtArgument { typed, glob })
}

/// Reads the name of one USDT probe, `PROVIDER:NAME`; refuses globs.
pub(super) fn usdt_probe(typed: &str) -> Result<Glob, String> {
    let UsdtArgument { typed, glob } = usdt(typed)?;
    if typed.contains(['*', '?', '[', '\\']) {
        return Err(format!("\"{typed}\" is a glob: give the name of one probe"));
    }
    Ok(glob)
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
                "\"ocaml_2:tick\" is a probe of OCaml: other flags, such as -probe and -pair, take its name, tick",
            ),
            ("a:[", "\"a:[\" is not a glob: it has a [ without a ]"),
        ] {
            assert_eq!(usdt(typed).err().as_deref(), Some(error));
        }
    }

    #[test]
    fn providers_and_names_are_given_apart() {
        assert!(provider("any").unwrap().glob.is_none());
        let postgresql = provider("postgres*").unwrap().glob;
        assert!(postgresql.unwrap().matches("postgresql"));
        assert!(usdt_name("query__*").unwrap().matches("query__start"));
        for (found, error) in [
            (
                provider("a:b*").err(),
                "\"a:b*\" is not a provider: write -provider a 'b*'",
            ),
            (provider("").err(), "a provider is empty"),
            (
                provider("[").err(),
                "\"[\" is not a glob: it has a [ without a ]",
            ),
            (
                usdt_name("a:b").err(),
                "\"a:b\" has a provider: write -provider a 'b'",
            ),
        ] {
            assert_eq!(found.as_deref(), Some(error));
        }
    }
}
