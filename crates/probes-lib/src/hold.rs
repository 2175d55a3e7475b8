//! [`Hold`]: an update that is to be undone, and is recorded so that others can do it if its holder is
//! killed. The facade of `update::holds`.

use crate::error::{Error, Result};
use crate::select::{Actions, choose, choose_undo};
use crate::target::Target;
use crate::update::holds::journal::{HoldChange, HoldJournal};
use crate::update::holds::{Holders, ReleasedHold, holders};
use crate::update::options::Options;
use crate::update::report::Report;

/// An update that is undone by [`Hold::release`]. It is recorded in a file as long as it lasts. If the holder
/// is killed, or drops this without releasing it, [`Target::holders`] shows that, and
/// [`Target::release_dead`] undoes what it has added.
///
/// A child that is forked meanwhile keeps the holder alive, until it exits or executes a program.
///
/// ```no_run
/// use probes_lib::{Actions, Selector, Target};
///
/// let target = Target::open(4242)?;
/// let actions = Actions::new().enable(Selector::name("req_start"));
/// let hold = target.hold(&actions, Default::default())?;
/// // ...
/// hold.release(Default::default())?;
/// # Ok::<(), probes_lib::Error>(())
/// ```
pub struct Hold {
    target: Target,
    report: Report,
    record: HoldJournal,
}

impl Hold {
    /// Returns what the update did.
    pub fn report(&self) -> &Report {
        &self.report
    }

    /// Returns whether there is anything to undo: a counter or a site was changed. A probe may have several counters, of which
    /// [`Report::changed`] has the least.
    pub fn has_changes(&self) -> bool {
        let added = self.report.applied.iter().flat_map(|it| it.added.iter());
        let sites = self.report.changed.iter().map(|change| change.sites);
        added.map(|(_, amount)| amount).any(|&amount| amount != 0) || sites.sum::<usize>() > 0
    }

    /// Returns why the hold is not recorded: nothing undoes it if this process is killed. `None` if it is
    /// recorded, or has changed nothing.
    pub fn unrecorded(&self) -> Option<String> {
        self.record.failure()
    }

    /// Undoes what was added: see [`Target::undo`]. If this fails, it can be tried again: what was undone by then
    /// is not undone twice.
    ///
    /// # Errors
    ///
    /// See [`Target::undo`].
    pub fn release(&self, options: Options) -> Result<Report> {
        let undo = |program: &_| choose_undo(program, &self.record.applied(program));
        let hold = Some((&self.record, HoldChange::Undo));
        let undone = self.target.carry_out(&undo, options, hold);
        if undone.as_ref().is_err_and(Error::is_program_gone) {
            self.record.remove();
        }
        undone
    }
}

impl Target {
    /// Same as [`Target::update_with`], for an update that is to be undone. Before anything is changed, it is
    /// recorded, in a file in `/run/ocaml-probes` (root) or `/tmp/ocaml-probes-UID`. An update that cannot be
    /// recorded is made nevertheless: see [`Hold::unrecorded`].
    ///
    /// # Errors
    ///
    /// See [`Target::update_with`].
    pub fn hold(&self, actions: &Actions, options: Options) -> Result<Hold> {
        let record = HoldJournal::new(self.opened.process());
        let choose = |program: &_| choose(program, actions);
        let hold = Some((&record, HoldChange::Take));
        let report = self.carry_out(&choose, options, hold)?;
        Ok(Hold {
            target: self.clone(),
            report,
            record,
        })
    }

    /// Returns the holders of probes of the process, running or not, without stopping it. Only the records of root, of
    /// our own user and of the user that the process belongs to are trusted, and only if their pids are of our
    /// pid namespace.
    pub fn holders(&self) -> Holders {
        holders(self.opened.process())
    }

    /// Undoes what dead holders have added, as [`Target::undo`] does, each in one update. Those of other
    /// users are left, unless we are root ([`Holder::can_be_released`](crate::Holder::can_be_released)).
    ///
    /// What was not added is not undone: if a holder was killed while it changed counters, and it cannot be
    /// known any more whether it had, they stay as they are.
    ///
    /// # Errors
    ///
    /// If another tool is updating the process, or the process has exited; nothing was changed then. What fails
    /// for one holder is in its [`ReleasedHold::report`].
    pub fn release_dead(&self, options: Options) -> Result<Vec<ReleasedHold>> {
        self.release_all_dead(options)
    }
}
