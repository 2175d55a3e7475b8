//! [`ObservableFunctions`]: which functions of a file can be counted and timed, as an observation plans it.

use std::cell::OnceCell;

use crate::address::LoadBias;
use crate::error::{Refusal, Result};
use crate::functions::{FunctionObject, FunctionPlace, Functions, SelectedBy, SelectedFunction};
use crate::observe::functions::fibers::ProcessStacks;
use crate::observe::functions::find::has_ocaml;
use crate::observe::functions::patches::Patching;
use crate::observe::functions::wanted::{CompiledExpressions, KnownPlace, Wanted};
use crate::patch_plan::{EntryPlanner, PatchPlanner};

/// Which functions of one file can be counted and timed, each by itself: what an observation would say. Reads files
/// only.
///
/// ```no_run
/// use probes_lib::{FunctionSelector, Functions, ObservableFunctions};
///
/// let functions = Functions::of_process(4242)?;
/// let observable = ObservableFunctions::of(&functions, &functions.objects()[0])?;
/// let selector = FunctionSelector::Glob("Http.*".parse().unwrap());
/// for function in functions.select(&[selector])? {
///     if let Err(why) = observable.can_time(&function) {
///         println!("{} {why}", function.name().unwrap());
///     }
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
pub struct ObservableFunctions<'f> {
    object: &'f FunctionObject,
    planner: PatchPlanner,
    stacks: ProcessStacks,
    has_ocaml: OnceCell<bool>,
}

impl<'f> ObservableFunctions<'f> {
    /// Reads the code of `object`, one of the files of `functions`.
    ///
    /// # Errors
    ///
    /// If the file cannot be read.
    pub fn of(
        functions: &Functions,
        object: &'f FunctionObject,
    ) -> Result<ObservableFunctions<'f>> {
        Ok(ObservableFunctions {
            object,
            planner: object.patch_planner()?,
            stacks: ProcessStacks::of(functions.objects().iter().map(FunctionObject::elf)),
            has_ocaml: OnceCell::new(),
        })
    }

    /// Returns whether the calls of a function of the file can be counted.
    ///
    /// # Errors
    ///
    /// If not: why.
    pub fn can_count(&self, function: &SelectedFunction<'_>) -> std::result::Result<(), Refusal> {
        self.plan(function, Wanted::Counted(None))
    }

    /// Returns whether the calls of a function of the file can be timed. Then they can be counted, too.
    ///
    /// # Errors
    ///
    /// If not: why.
    pub fn can_time(&self, function: &SelectedFunction<'_>) -> std::result::Result<(), Refusal> {
        self.plan(function, Wanted::Timed(None, None))
    }

    fn plan(
        &self,
        function: &SelectedFunction<'_>,
        wanted: Wanted<'_>,
    ) -> std::result::Result<(), Refusal> {
        let place = FunctionPlace {
            function: *function,
            offset: 0,
            named_by: None,
            is_named_alone: false,
            selected_by: SelectedBy::Function,
        };
        // Of a file, any load bias will do: where it will be loaded is not known.
        let bias = self.object.load_bias().unwrap_or(LoadBias(0));
        let has_ocaml = || *self.has_ocaml.get_or_init(|| has_ocaml(self.object));
        let known = KnownPlace::of(&place, bias, wanted, has_ocaml);
        let entry_planner = EntryPlanner::of(&self.planner);
        let patching = Patching::of(
            &known,
            &entry_planner,
            Some(&self.planner),
            bias,
            self.stacks,
        );
        let asked = CompiledExpressions::default();
        patching.of_place(&known, Some(&asked), None).map(|_| ())
    }
}
