//! `ps`: the running processes that have OCaml probes.

use nix::unistd::{Uid, User};
use probes_lib::survey;

use super::Failure;
use crate::output::{self, Processes};
use crate::request::Ps;

pub(super) fn run(request: &Ps) -> Result<(), Failure> {
    let answer = request.answer;
    let survey = survey().map_err(Failure::Survey)?;
    output::print_processes(answer.format, &Processes::of(&survey, user_name))?;
    match survey.denied.len() {
        0 => {}
        1 => answer
            .messages
            .step(format_args!("1 process could not be looked into")),
        denied => answer
            .messages
            .step(format_args!("{denied} processes could not be looked into")),
    }
    Ok(())
}

/// The name of a user, or his number.
fn user_name(uid: u32) -> String {
    match User::from_uid(Uid::from_raw(uid)) {
        Ok(Some(user)) => user.name,
        _ => uid.to_string(),
    }
}
