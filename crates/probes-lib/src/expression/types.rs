//! Type-checks an expression for a point. Each part gets a type there (a number, string, float or OCaml value); an
//! expression whose parts do not fit together is refused.

use std::ops::Range;

use super::interpret::{Answer, Hit};
use super::lexer::{Operator, Wrong};
use super::problem::ExpressionProblem as Problem;
use super::syntax::{Node, NodeKind};
use super::typed::{
    Calculation, Float, KeyPart, MAX_COMPARED, MAX_REGISTERS, Number, Relation, Signedness, Test,
    Text, Word,
};
use crate::near::near_names;

/// What is known of the hits of a point.
///
/// ```
/// use probes_lib::{Expression, Parameter, ParameterKind, Scope};
///
/// let word = Parameter { name: Some("size".to_owned()), kind: ParameterKind::Word };
/// let malloc = Scope::of("function malloc", "malloc", vec![word]);
/// let large: Expression = "size > 0x10000".parse()?;
/// assert!(large.filter(&malloc).is_ok());
/// let text: Expression = "size == \"GET\"".parse()?;
/// assert!(text.filter(&malloc).is_err());
/// # Ok::<(), probes_lib::BadExpression>(())
/// ```
#[derive(Clone, Debug)]
pub struct Scope {
    /// What messages call the point.
    point: String,
    /// The value of `probe` in expressions.
    name: String,
    /// `None` if it is not known which there are.
    parameters: Option<Vec<Parameter>>,
    /// Whether the return address of a call is at the top of the stack.
    has_caller: bool,
    /// At the exits of a function: the kind of its result, which is argument 0 of a hit, and the only one. `None` at
    /// other points.
    result: Option<ParameterKind>,
    /// Whether a trampoline may make a system call to find out which memory can be read, as strings of C need. It may
    /// not if a seccomp filter of the process could refuse the call.
    may_ask_kernel: bool,
}

/// An argument of a point.
///
/// [`Scope`] has an example.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Its name, if that is known: it can be used instead of its number.
    pub name: Option<String>,
    /// What it is.
    pub kind: ParameterKind,
}

/// What an argument is.
///
/// [`Scope`] has an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ParameterKind {
    /// An OCaml value. Whether it is an `int` or a block, and of which type, is only known at a hit.
    Value,
    /// An unboxed float of 8 bytes.
    Float,
    /// An unboxed float of 4 bytes, the lower ones of a word.
    Single,
    /// A number of 8, 16 or 32 bits.
    Number {
        /// How many.
        bits: u8,
        /// Whether it may be negative.
        signed: bool,
    },
    /// A word of C, 64 bits: an integer or a pointer. Without a conversion, expressions take it for a signed integer.
    Word,
    /// An argument in a place of an unknown kind: it cannot be asked for.
    Unread,
    /// An argument anywhere in memory, in a process with a seccomp filter: whether it can be read would take a system
    /// call, which the filter might refuse.
    Unasked,
}

impl Scope {
    /// Returns the scope of a point with these arguments. Messages call it `point`; in expressions, `probe` is `name`.
    pub fn of(
        point: impl Into<String>,
        name: impl Into<String>,
        parameters: Vec<Parameter>,
    ) -> Scope {
        Scope {
            point: point.into(),
            name: name.into(),
            parameters: Some(parameters),
            has_caller: false,
            result: None,
            may_ask_kernel: true,
        }
    }

    /// Returns the same scope, with arguments and a result that are numbers taken for words.
    pub(crate) fn of_words(mut self) -> Scope {
        let parameters = self.parameters.iter_mut().flatten();
        let kinds = parameters.map(|it| &mut it.kind).chain(&mut self.result);
        for kind in kinds {
            if let ParameterKind::Number { .. } = kind {
                *kind = ParameterKind::Word;
            }
        }
        self
    }

    /// The same, with this `may_ask_kernel`.
    pub(crate) fn asking_kernel_if(self, may_ask_kernel: bool) -> Scope {
        Scope {
            may_ask_kernel,
            ..self
        }
    }

    /// The same for the entry of a function, where `caller` is known.
    #[must_use]
    pub fn of_entry(self) -> Scope {
        Scope {
            has_caller: true,
            ..self
        }
    }

    /// Returns the scope of the exits of a function with a result of this kind: `retval` in expressions, and the first
    /// argument of a [`Hit`]. The function's arguments are not known there.
    ///
    /// ```
    /// use probes_lib::{Expression, ParameterKind, Scope};
    ///
    /// let exits = Scope::of_exits("function f", "f", ParameterKind::Value);
    /// let found: Expression = "retval > 0".parse()?;
    /// assert!(found.filter(&exits).is_ok());
    /// let both: Expression = "retval > arg0".parse()?;
    /// assert!(both.filter(&exits).is_err());
    /// # Ok::<(), probes_lib::BadExpression>(())
    /// ```
    pub fn of_exits(
        point: impl Into<String>,
        name: impl Into<String>,
        result: ParameterKind,
    ) -> Scope {
        Scope {
            has_caller: true,
            result: Some(result),
            ..Scope::of(point, name, Vec::new())
        }
    }

    /// Returns the scope of a point of which it is not known which arguments it has.
    pub fn without_arguments(point: impl Into<String>, name: impl Into<String>) -> Scope {
        Scope {
            parameters: None,
            ..Scope::of(point, name, Vec::new())
        }
    }
}

/// What an expression asks of the hits of a point.
///
/// ```
/// use probes_lib::{Expression, Scope};
///
/// let expression: Expression = "probe == \"tick\"".parse()?;
/// let filter = expression.filter(&Scope::of("probe tick", "tick", Vec::new()))?;
/// # Ok::<(), probes_lib::BadExpression>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Filter {
    pub(crate) test: Test,
}

impl Filter {
    /// Returns the answer for a hit.
    pub fn answer(&self, hit: &impl Hit) -> Answer {
        super::interpret::answer(&self.test, hit)
    }
}

/// The integer that an expression is at the hits of a point: 64 bits.
///
/// [`Expression::integer`](super::Expression::integer) has an example.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct IntegerExpression {
    pub(crate) number: Number,
    is_signed: bool,
}

impl IntegerExpression {
    /// Returns whether it may be negative: if so, its 64 bits are those of an `i64`.
    pub fn is_signed(&self) -> bool {
        self.is_signed
    }

    /// Returns the integer at a hit. `None` is untyped: a value does not have the type that the expression needs, or
    /// cannot be read.
    pub fn value(&self, hit: &impl Hit) -> Option<u64> {
        super::interpret::number(&self.number, hit)
    }
}

/// The names that expressions can use besides those of arguments.
pub(super) const NAMES: [&str; 5] = ["probe", "tid", "caller", "retval", "elapsed"];

/// The functions of expressions.
const FUNCTIONS: [&str; 6] = ["int", "u64", "float", "str", "len", "tag"];

/// A part of an expression.
enum Part {
    Truth(Test),
    Number(Number, IntegerType),
    Float(Float),
    Literal(Vec<u8>),
    Text(Text),
    /// A value of OCaml: what it is compared with decides how it is read.
    Value(Word),
    Word(Word),
    Time,
}

/// How the 64 bits of a number are to be read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum IntegerType {
    Signed,
    Unsigned,
    /// A literal below 2^63, which is the same number either way.
    Either,
}

impl IntegerType {
    /// Returns the type of what is calculated from two numbers.
    fn of_calculation(one: IntegerType, other: IntegerType) -> IntegerType {
        if one == IntegerType::Unsigned || other == IntegerType::Unsigned {
            IntegerType::Unsigned
        } else {
            IntegerType::Signed
        }
    }

    fn is_signed(self) -> bool {
        self != IntegerType::Unsigned
    }
}

impl Part {
    fn kind(&self) -> &'static str {
        match self {
            Part::Truth(_) => "a comparison",
            Part::Number(..) => "an integer",
            Part::Float(_) => "a float",
            Part::Literal(_) | Part::Text(Text::Ocaml(_)) => "a string",
            Part::Text(Text::C(_)) => "a string of C",
            Part::Value(_) => "an OCaml value",
            Part::Word(_) => "a word of C",
            Part::Time => "a time",
        }
    }
}

/// Returns what an expression asks of the hits of a point.
pub(super) fn filter(tree: &Node, text: &str, scope: &Scope) -> Result<Filter, Wrong> {
    let typing = Typing { text, scope };
    let test = typing.truth(tree)?;
    Ok(Filter { test })
}

/// Returns the integer that an expression is at the hits of a point.
pub(super) fn integer(tree: &Node, text: &str, scope: &Scope) -> Result<IntegerExpression, Wrong> {
    let typing = Typing { text, scope };
    let (number, integer_type) = typing.number(tree)?;
    if number.registers() > MAX_REGISTERS {
        return Err((tree.place.clone(), Problem::TooManyNumbers));
    }
    Ok(IntegerExpression {
        number,
        is_signed: integer_type.is_signed(),
    })
}

/// Returns what an expression is as a key of the hits of a point.
pub(super) fn key(tree: &Node, text: &str, scope: &Scope) -> Result<KeyPart, Wrong> {
    match &tree.kind {
        NodeKind::Name(name) if name == "probe" => return Ok(KeyPart::Probe),
        NodeKind::Name(name) if name == "tid" => return Ok(KeyPart::Thread),
        NodeKind::Name(name) if name == "caller" && scope.has_caller => return Ok(KeyPart::Caller),
        _ => {}
    }
    let typing = Typing { text, scope };
    match typing.part(tree)? {
        Part::Text(text) => Ok(KeyPart::Text(text)),
        part => match as_number(part) {
            Ok((number, integer_type)) => Ok(KeyPart::Number(number, integer_type.is_signed())),
            Err(part) => Err(typing.wrong_kind(tree, &part, "an integer, or str(...)")),
        },
    }
}

struct Typing<'t> {
    text: &'t str,
    scope: &'t Scope,
}

impl Typing<'_> {
    fn text(&self, place: &Range<usize>) -> String {
        /// Longer ones are not repeated in messages.
        const LONGEST: usize = 40;
        let text = &self.text[place.clone()];
        if text.chars().count() <= LONGEST {
            return text.to_owned();
        }
        text.chars().take(LONGEST).chain("...".chars()).collect()
    }

    fn wrong_kind(&self, node: &Node, part: &Part, wanted: &'static str) -> Wrong {
        let problem = Problem::WrongKind {
            text: self.text(&node.place),
            is: part.kind(),
            wanted,
        };
        (node.place.clone(), problem)
    }

    fn truth(&self, node: &Node) -> Result<Test, Wrong> {
        match self.part(node)? {
            Part::Truth(test) => Ok(test),
            part => Err(self.wrong_kind(node, &part, "a comparison")),
        }
    }

    /// Returns a part that is used as a number.
    fn number(&self, node: &Node) -> Result<(Number, IntegerType), Wrong> {
        let part = self.part(node)?;
        match as_number(part) {
            Ok(number) => Ok(number),
            Err(part) => Err(self.wrong_kind(node, &part, "an integer")),
        }
    }

    /// Returns a part that is used as a value of OCaml.
    fn value(&self, node: &Node) -> Result<Word, Wrong> {
        match self.part(node)? {
            Part::Value(word) => Ok(word),
            part => Err(self.wrong_kind(node, &part, "an OCaml value")),
        }
    }

    fn part(&self, node: &Node) -> Result<Part, Wrong> {
        Ok(match &node.kind {
            NodeKind::Number(number) => {
                let integer_type = if *number > i64::MAX as u64 {
                    IntegerType::Unsigned
                } else {
                    IntegerType::Either
                };
                Part::Number(Number::Literal(*number), integer_type)
            }
            NodeKind::Float(number) => Part::Float(Float::Literal(number.to_bits())),
            NodeKind::Time(_) => Part::Time,
            NodeKind::Text(text) => Part::Literal(text.clone()),
            NodeKind::Name(name) => self.name(node, name)?,
            NodeKind::Call(name, inside) => self.call(node, name, inside)?,
            NodeKind::Field(of, field) => {
                let of = self.value(of)?;
                Part::Value(Word::Field(Box::new(of), *field))
            }
            NodeKind::Not(inside) => Part::Truth(Test::Not(Box::new(self.truth(inside)?))),
            NodeKind::Minus(inside) => self.minus(node, inside)?,
            NodeKind::Binary(operator, left, right) => self.binary(node, *operator, left, right)?,
        })
    }

    fn name(&self, node: &Node, name: &str) -> Result<Part, Wrong> {
        let wrong = |problem| Err((node.place.clone(), problem));
        let not_here = |name, why| wrong(Problem::NotHere { name, why });
        match name {
            "probe" => return Ok(Part::Literal(self.scope.name.clone().into_bytes())),
            "tid" => return Ok(Part::Number(Number::Thread, IntegerType::Signed)),
            "caller" if self.scope.has_caller => {
                return Ok(Part::Number(Number::Caller, IntegerType::Unsigned));
            }
            "caller" => {
                return not_here(
                    "caller",
                    "only the entry and the exits of a function have one",
                );
            }
            "retval" => {
                return match self.scope.result {
                    Some(kind) => self.argument(node, name, 0, kind),
                    None => not_here(
                        "retval",
                        "a result is known where a function returns, which `count -fn`, `hist -fn` and `watch -fn` ask",
                    ),
                };
            }
            "elapsed" => {
                return not_here(
                    "elapsed",
                    "a time is known at the end of a pair or call, which `latency -where` asks, and `latency` makes the histogram of times",
                );
            }
            _ => {}
        }
        let number = name.strip_prefix("arg").and_then(argument_number);
        if number.is_some() && self.scope.result.is_some() {
            let name = name.to_owned();
            return wrong(Problem::GoneAtExit { name });
        }
        let Some(parameters) = &self.scope.parameters else {
            if number.is_some() {
                let point = self.scope.point.clone();
                return wrong(Problem::UnknownArguments { point });
            }
            return wrong(self.unknown_name(name, &[]));
        };
        let mut named = parameters.iter();
        let named = named.position(|it| it.name.as_deref() == Some(name));
        let Some(index) = named.or(number) else {
            return wrong(self.unknown_name(name, parameters));
        };
        let Some(parameter) = parameters.get(index) else {
            return wrong(Problem::NoArgument {
                point: self.scope.point.clone(),
                name: name.to_owned(),
                has: parameters.len(),
            });
        };
        self.argument(node, name, index, parameter.kind)
    }

    /// Returns the argument of this number, which is called `name`.
    fn argument(
        &self,
        node: &Node,
        name: &str,
        index: usize,
        kind: ParameterKind,
    ) -> Result<Part, Wrong> {
        let word = Word::Argument(index as u8);
        Ok(match kind {
            ParameterKind::Value => Part::Value(word),
            ParameterKind::Word => Part::Word(word),
            ParameterKind::Float => Part::Float(Float::Word(word)),
            ParameterKind::Single => Part::Float(Float::Single(word)),
            ParameterKind::Number { bits, signed } => {
                let signedness = Signedness::of(signed);
                // Extended to 64 bits, an unsigned one is never negative: all of them can be compared as signed.
                Part::Number(
                    Number::Narrow(word, bits.clamp(1, 32), signedness),
                    IntegerType::Signed,
                )
            }
            ParameterKind::Unread | ParameterKind::Unasked => {
                let (point, name) = (self.scope.point.clone(), name.to_owned());
                let problem = if kind == ParameterKind::Unread {
                    Problem::UnreadArgument { point, name }
                } else {
                    Problem::UnaskedArgument { point, name }
                };
                return Err((node.place.clone(), problem));
            }
        })
    }

    fn unknown_name(&self, name: &str, parameters: &[Parameter]) -> Problem {
        let numbered = (0..parameters.len()).map(|index| format!("arg{index}"));
        let named = parameters.iter().filter_map(|it| it.name.clone());
        let others = NAMES.into_iter().map(str::to_owned);
        let mut near = near_names(numbered.chain(named).chain(others), name);
        let number = name.strip_prefix("arg").unwrap_or_default();
        if !number.is_empty() && number.bytes().all(|it| it.is_ascii_digit()) {
            // An argument has one digit.
            near = vec!["arg0 to arg9".to_owned()];
        }
        let named = parameters.iter().filter_map(|it| it.name.as_deref());
        let named: Vec<&str> = named.collect();
        let arguments = match &named[..] {
            [] => String::new(),
            named => {
                let point = &self.scope.point;
                format!("the arguments of {point} are {}", named.join(", "))
            }
        };
        Problem::UnknownName {
            name: name.to_owned(),
            near,
            arguments,
        }
    }

    fn call(&self, node: &Node, name: &str, inside: &Node) -> Result<Part, Wrong> {
        let needs = |part: &Part, wanted| Err(self.wrong_kind(inside, part, wanted));
        match name {
            "int" => match self.part(inside)? {
                // A C int: the upper half of its register is not defined.
                Part::Word(word)
                | Part::Number(
                    Number::Narrow(word, 32, Signedness::Unsigned),
                    IntegerType::Signed,
                ) => Ok(Part::Number(
                    Number::Narrow(word, 32, Signedness::Signed),
                    IntegerType::Signed,
                )),
                part => match as_number(part) {
                    Ok((number, _)) => Ok(Part::Number(number, IntegerType::Signed)),
                    Err(part) => needs(&part, "an integer"),
                },
            },
            "u64" => match self.part(inside)? {
                Part::Value(word) | Part::Word(word) => {
                    Ok(Part::Number(Number::Word(word), IntegerType::Unsigned))
                }
                Part::Number(number, _) => Ok(Part::Number(number, IntegerType::Unsigned)),
                part => needs(&part, "an integer"),
            },
            "float" => match self.part(inside)? {
                Part::Float(float) => Ok(Part::Float(float)),
                Part::Value(word) => Ok(Part::Float(Float::Boxed(word))),
                part => needs(&part, "an OCaml value"),
            },
            "str" => match self.part(inside)? {
                text @ (Part::Text(_) | Part::Literal(_)) => Ok(text),
                Part::Value(word) => Ok(Part::Text(Text::Ocaml(word))),
                Part::Word(_) if !self.scope.may_ask_kernel => {
                    Err((node.place.clone(), Problem::UnreadText))
                }
                Part::Word(word) => Ok(Part::Text(Text::C(word))),
                part => needs(&part, "an OCaml value, or a word of C"),
            },
            "len" => match self.part(inside)? {
                Part::Text(Text::Ocaml(word)) | Part::Value(word) => {
                    Ok(Part::Number(Number::Len(word), IntegerType::Signed))
                }
                part => needs(&part, "an OCaml value"),
            },
            "tag" => Ok(Part::Number(
                Number::Tag(self.value(inside)?),
                IntegerType::Signed,
            )),
            _ => {
                let problem = Problem::UnknownFunction {
                    name: name.to_owned(),
                    near: near_names(FUNCTIONS, name),
                };
                let place = node.place.start..node.place.start + name.len();
                Err((place, problem))
            }
        }
    }

    fn minus(&self, node: &Node, inside: &Node) -> Result<Part, Wrong> {
        match &inside.kind {
            NodeKind::Number(number) if *number <= 1 << 63 => {
                let number = Number::Literal(number.wrapping_neg());
                Ok(Part::Number(number, IntegerType::Signed))
            }
            NodeKind::Number(_) => Err((node.place.clone(), Problem::TooLarge)),
            NodeKind::Float(number) => Ok(Part::Float(Float::Literal((-number).to_bits()))),
            _ => {
                let (number, integer_type) = self.number(inside)?;
                let zero = Box::new(Number::Literal(0));
                let number = Number::Calculated(Calculation::Subtract, zero, Box::new(number));
                let integer_type = IntegerType::of_calculation(IntegerType::Either, integer_type);
                Ok(Part::Number(number, integer_type))
            }
        }
    }

    fn binary(
        &self,
        node: &Node,
        operator: Operator,
        left: &Node,
        right: &Node,
    ) -> Result<Part, Wrong> {
        let calculation = match operator {
            Operator::Or => {
                let (left, right) = (self.truth(left)?, self.truth(right)?);
                return Ok(Part::Truth(Test::Or(Box::new(left), Box::new(right))));
            }
            Operator::And => {
                let (left, right) = (self.truth(left)?, self.truth(right)?);
                return Ok(Part::Truth(Test::And(Box::new(left), Box::new(right))));
            }
            Operator::ShiftRight => {
                let (number, integer_type) = self.number(left)?;
                let NodeKind::Number(by @ 0..64) = right.kind else {
                    return Err((right.place.clone(), Problem::BadShift));
                };
                let signedness = Signedness::of(integer_type.is_signed());
                let number = Number::Shifted(Box::new(number), by as u8, signedness);
                return Ok(Part::Number(number, integer_type));
            }
            Operator::Add => Calculation::Add,
            Operator::Subtract => Calculation::Subtract,
            Operator::Multiply => Calculation::Multiply,
            Operator::BitAnd => Calculation::And,
            Operator::BeginsWith => return self.begins_with(node, left, right),
            Operator::Compare(relation) => return self.compare(node, relation, left, right),
        };
        let ((one, one_type), (other, other_type)) = (self.number(left)?, self.number(right)?);
        let number = Number::Calculated(calculation, Box::new(one), Box::new(other));
        Ok(Part::Number(
            number,
            IntegerType::of_calculation(one_type, other_type),
        ))
    }

    fn begins_with(&self, node: &Node, left: &Node, right: &Node) -> Result<Part, Wrong> {
        let (of, with) = (self.part(left)?, self.part(right)?);
        let (of, with) = match (of, with) {
            (Part::Literal(of), Part::Literal(with)) => {
                return Ok(Part::Truth(Test::Constant(of.starts_with(&with))));
            }
            (Part::Text(of), Part::Literal(with)) => (of, with),
            (Part::Value(of), Part::Literal(with)) => (Text::Ocaml(of), with),
            (Part::Text(_) | Part::Value(_) | Part::Literal(_), Part::Text(_) | Part::Value(_)) => {
                return Err((right.place.clone(), Problem::NoLiteral));
            }
            (of, with) => return Err(self.mismatch(node, &of, &with)),
        };
        let with = checked(with, right)?;
        if of.is_of_c() && with.contains(&0) {
            return Ok(Part::Truth(Test::Constant(false)));
        }
        Ok(Part::Truth(Test::BeginsWith(of, with)))
    }

    fn compare(
        &self,
        node: &Node,
        relation: Relation,
        left: &Node,
        right: &Node,
    ) -> Result<Part, Wrong> {
        let (one, other) = (self.part(left)?, self.part(right)?);
        let test = match (one, other) {
            (Part::Literal(one), Part::Literal(other)) => {
                let order = Some(one.cmp(&other));
                Test::Constant(relation.holds(order))
            }
            (Part::Text(of), Part::Literal(text)) => {
                self.is_string(node, relation, of, checked(text, right)?)?
            }
            (Part::Literal(text), Part::Text(of)) => {
                self.is_string(node, relation, of, checked(text, left)?)?
            }
            (Part::Value(of), Part::Literal(text)) => {
                self.is_string(node, relation, Text::Ocaml(of), checked(text, right)?)?
            }
            (Part::Literal(text), Part::Value(of)) => {
                self.is_string(node, relation, Text::Ocaml(of), checked(text, left)?)?
            }
            (Part::Text(_), Part::Text(_) | Part::Value(_)) | (Part::Value(_), Part::Text(_)) => {
                return Err((node.place.clone(), Problem::NoLiteral));
            }
            (one, other) => match floats(one, other) {
                Ok((one, other)) => Test::CompareFloats(relation, one, other),
                Err((one, other)) => {
                    let kinds = (one.kind(), other.kind());
                    let (Ok(one), Ok(other)) = (as_number(one), as_number(other)) else {
                        return Err(self.mismatch_of(node, kinds));
                    };
                    self.numbers(node, relation, one, other)?
                }
            },
        };
        Ok(Part::Truth(test))
    }

    fn is_string(
        &self,
        node: &Node,
        relation: Relation,
        of: Text,
        text: Vec<u8>,
    ) -> Result<Test, Wrong> {
        let is = if of.is_of_c() && text.contains(&0) {
            // A string of C ends at its first NUL.
            Test::Constant(false)
        } else {
            Test::IsString(of, text)
        };
        match relation {
            Relation::Equal => Ok(is),
            Relation::NotEqual => Ok(Test::Not(Box::new(is))),
            _ => Err((node.place.clone(), Problem::NoOrder)),
        }
    }

    fn numbers(
        &self,
        node: &Node,
        relation: Relation,
        (one, one_type): (Number, IntegerType),
        (other, other_type): (Number, IntegerType),
    ) -> Result<Test, Wrong> {
        if Number::registers_of_both(&one, &other) > MAX_REGISTERS {
            return Err((node.place.clone(), Problem::TooManyNumbers));
        }
        let is_negative = |number: &Number| matches!(number, Number::Literal(it) if *it >> 63 == 1);
        let signed = match (one_type, other_type) {
            (IntegerType::Signed, IntegerType::Unsigned) => Some(&one),
            (IntegerType::Unsigned, IntegerType::Signed) => Some(&other),
            _ => None,
        };
        if let Some(signed) = signed {
            let problem = if is_negative(signed) {
                Problem::NeverNegative
            } else {
                Problem::MixedSigns {
                    text: self.text(&node.place),
                }
            };
            return Err((node.place.clone(), problem));
        }
        let signedness = Signedness::of(one_type.is_signed() && other_type.is_signed());
        Ok(Test::Compare(relation, signedness, one, other))
    }

    fn mismatch(&self, node: &Node, one: &Part, other: &Part) -> Wrong {
        self.mismatch_of(node, (one.kind(), other.kind()))
    }

    fn mismatch_of(&self, node: &Node, (left, right): (&'static str, &'static str)) -> Wrong {
        let problem = Problem::Mismatch {
            text: self.text(&node.place),
            left,
            right,
        };
        (node.place.clone(), problem)
    }
}

/// Returns the number in the name of an argument: 0 to 9.
fn argument_number(digits: &str) -> Option<usize> {
    match digits.as_bytes() {
        [digit @ b'0'..=b'9'] => Some(usize::from(digit - b'0')),
        _ => None,
    }
}

/// Returns a part as a number, or itself if it is none.
fn as_number(part: Part) -> Result<(Number, IntegerType), Part> {
    match part {
        Part::Number(number, integer_type) => Ok((number, integer_type)),
        Part::Value(word) => Ok((Number::Int(word), IntegerType::Signed)),
        Part::Word(word) => Ok((Number::Word(word), IntegerType::Signed)),
        part => Err(part),
    }
}

/// Returns both parts as floats if one is a float and the other one can be read as one: a literal number, or an OCaml
/// value, which then has to be a boxed float. Otherwise returns the parts unchanged.
fn floats(one: Part, other: Part) -> Result<(Float, Float), (Part, Part)> {
    let is_float = |part: &Part| matches!(part, Part::Float(_));
    if !is_float(&one) && !is_float(&other) {
        return Err((one, other));
    }
    let can_be = |part: &Part| {
        let is_literal = matches!(part, Part::Number(Number::Literal(_), _));
        is_literal || matches!(part, Part::Float(_) | Part::Value(_))
    };
    if !can_be(&one) || !can_be(&other) {
        return Err((one, other));
    }
    let float = |part| match part {
        Part::Float(float) => float,
        Part::Value(word) => Float::Boxed(word),
        Part::Number(Number::Literal(number), IntegerType::Unsigned) => {
            Float::Literal((number as f64).to_bits())
        }
        Part::Number(Number::Literal(number), _) => {
            Float::Literal((number as i64 as f64).to_bits())
        }
        _ => Float::Literal(0),
    };
    Ok((float(one), float(other)))
}

/// Refuses a string that is too long to be compared.
fn checked(text: Vec<u8>, node: &Node) -> Result<Vec<u8>, Wrong> {
    if text.len() > MAX_COMPARED {
        return Err((node.place.clone(), Problem::LongLiteral(MAX_COMPARED)));
    }
    Ok(text)
}
