//! `-where`: which hits are meant.

use probes_lib::{BadExpression, Expression, Observation};

#[derive(Debug, clap::Args)]
pub(crate) struct FilterFlags {
    /// Only the hits for which EXPR is true, such as 'arg0 > 5'
    #[arg(id = "where", long, value_name = "EXPR", value_parser = expression, allow_hyphen_values = true)]
    expression: Option<Expression>,
}

impl FilterFlags {
    pub(crate) fn is_given(&self) -> bool {
        self.expression.is_some()
    }

    /// Returns an observation of these hits only.
    pub(crate) fn add_to(&self, observation: Observation) -> Observation {
        match &self.expression {
            Some(expression) => observation.only_where(expression.clone()),
            None => observation,
        }
    }

    /// Returns an observation of the times only of pairs and calls that begin with such a hit.
    pub(crate) fn add_to_starts(&self, observation: Observation) -> Observation {
        match &self.expression {
            Some(expression) => observation.only_starts_where(expression.clone()),
            None => observation,
        }
    }
}

/// Reads an expression.
pub(super) fn expression(typed: &str) -> Result<Expression, BadExpression> {
    typed.parse()
}
