//! The tree of an expression, and how its tokens are parsed into one.

use std::ops::Range;

use super::lexer::{Operator, Token, Wrong, tokens};
use super::problem::ExpressionProblem as Problem;
use super::{MAX_DEPTH, MAX_LEN};

/// A part of an expression.
#[derive(Clone, Debug)]
pub(super) struct Node {
    /// Where it is in the text, in bytes.
    pub(super) place: Range<usize>,
    pub(super) kind: NodeKind,
    /// How many levels of parts it has, itself included.
    pub(super) depth: u32,
}

#[derive(Clone, Debug)]
pub(super) enum NodeKind {
    Number(u64),
    Float(f64),
    /// In nanoseconds.
    Time(u64),
    Text(Vec<u8>),
    Name(String),
    Call(String, Box<Node>),
    Field(Box<Node>, u32),
    Not(Box<Node>),
    Minus(Box<Node>),
    Binary(Operator, Box<Node>, Box<Node>),
}

impl Node {
    /// Returns whether a name is used somewhere in it.
    pub(super) fn has_name(&self, name: &str) -> bool {
        self.place_of(name).is_some()
    }

    /// Returns where a name is used first.
    pub(super) fn place_of(&self, name: &str) -> Option<Range<usize>> {
        match &self.kind {
            NodeKind::Name(it) if it == name => Some(self.place.clone()),
            _ => self.parts().find_map(|part| part.place_of(name)),
        }
    }

    /// Returns whether it asks for something in memory that a value points to.
    pub(super) fn asks_for_memory(&self) -> bool {
        let is_it = match &self.kind {
            NodeKind::Text(_) | NodeKind::Field(..) => true,
            NodeKind::Call(name, _) => matches!(&**name, "str" | "len" | "tag" | "float"),
            _ => false,
        };
        is_it || self.parts().any(Node::asks_for_memory)
    }

    fn parts(&self) -> impl Iterator<Item = &Node> {
        let (one, other) = match &self.kind {
            NodeKind::Call(_, part)
            | NodeKind::Field(part, _)
            | NodeKind::Not(part)
            | NodeKind::Minus(part) => (Some(part), None),
            NodeKind::Binary(_, left, right) => (Some(left), Some(right)),
            _ => (None, None),
        };
        one.into_iter().chain(other).map(|part| &**part)
    }
}

/// Returns the tree of an expression.
pub(super) fn parse(text: &str) -> Result<Node, Wrong> {
    if text.len() > MAX_LEN && !text.trim().is_empty() {
        return Err((place_of_excess(text), Problem::TooLong));
    }
    let mut parser = Parser {
        text,
        tokens: tokens(text)?,
        next: 0,
    };
    if parser.tokens.is_empty() {
        return Err((0..text.len(), Problem::Empty));
    }
    let tree = parser.binary(0, 0)?;
    match parser.peek() {
        None => Ok(tree),
        Some((place, Token::Close)) => {
            let problem = Problem::NoOperator {
                typed: ")",
                instead: "no ( is open",
            };
            Err((place.clone(), problem))
        }
        Some((place, _)) => {
            let typed = parser.text[place.clone()].to_owned();
            Err((place.clone(), Problem::OperatorMissing(typed)))
        }
    }
}

/// Returns which part of a text is too much. It has something other than spaces before it or in it, so that it can be
/// shown.
fn place_of_excess(text: &str) -> Range<usize> {
    let end = text.trim_end().len();
    let mut excess = text.char_indices().skip_while(|&(at, _)| at < MAX_LEN);
    let start = excess.find(|(_, it)| !it.is_whitespace());
    start.map_or(end, |(at, _)| at)..end
}

struct Parser<'t> {
    text: &'t str,
    tokens: Vec<(Range<usize>, Token)>,
    next: usize,
}

impl Parser<'_> {
    fn peek(&self) -> Option<&(Range<usize>, Token)> {
        self.tokens.get(self.next)
    }

    /// Takes the next token.
    fn take(&mut self) -> Option<(Range<usize>, Token)> {
        let token = self.tokens.get(self.next).cloned();
        self.next += 1;
        token
    }

    /// Parses an operand, and the operators after it, with theirs, whose precedence is at least `least`. It is
    /// `outer` levels deep in the expression.
    fn binary(&mut self, least: u32, outer: u32) -> Result<Node, Wrong> {
        let mut left = self.unary(outer)?;
        let mut is_compared = false;
        while let Some((place, Token::Operator(operator))) = self.peek() {
            let (place, operator) = (place.clone(), *operator);
            if operator.precedence() < least {
                break;
            }
            if operator.is_comparison() && is_compared {
                return Err((place, Problem::Chained));
            }
            is_compared = operator.is_comparison();
            self.next += 1;
            let right = self.binary(operator.precedence() + 1, outer + 1)?;
            left = joined(operator, left, right)?;
        }
        Ok(left)
    }

    /// Parses an operand: a value, a call or a pair of parentheses, maybe with fields; or an operand after `!` or `-`.
    fn unary(&mut self, outer: u32) -> Result<Node, Wrong> {
        let at_end = self.text.len()..self.text.len();
        let Some((place, token)) = self.take() else {
            return Err((at_end, Problem::NoValue { before: None }));
        };
        if outer >= MAX_DEPTH {
            return Err((place, Problem::TooDeep));
        }
        let kind = match token {
            Token::Number(number) => NodeKind::Number(number),
            Token::Float(number) => NodeKind::Float(number),
            Token::Time(time) => NodeKind::Time(time),
            Token::Text(text) => NodeKind::Text(text),
            Token::Name(name) => {
                if !matches!(self.peek(), Some((_, Token::Open))) {
                    return self.with_fields(node(place, NodeKind::Name(name))?);
                }
                self.next += 1;
                let (inside, end) = self.in_parentheses(outer)?;
                let place = place.start..end;
                return self.with_fields(node(place, NodeKind::Call(name, Box::new(inside)))?);
            }
            Token::Open => {
                let (inside, end) = self.in_parentheses(outer)?;
                let place = place.start..end;
                return self.with_fields(Node { place, ..inside });
            }
            Token::Not | Token::Operator(Operator::Subtract) => {
                let part = Box::new(self.unary(outer + 1)?);
                let place = place.start..part.place.end;
                let kind = match token {
                    Token::Not => NodeKind::Not(part),
                    _ => NodeKind::Minus(part),
                };
                return node(place, kind);
            }
            Token::Close | Token::Field(_) | Token::Operator(_) => {
                let before = Some(self.text[place.clone()].to_owned());
                return Err((place, Problem::NoValue { before }));
            }
        };
        node(place, kind)
    }

    /// Parses what is between parentheses, whose `(` has been taken, and the `)`; returns where that ends, too.
    fn in_parentheses(&mut self, outer: u32) -> Result<(Node, usize), Wrong> {
        let inside = self.binary(0, outer + 1)?;
        match self.take() {
            Some((place, Token::Close)) => Ok((inside, place.end)),
            Some((place, _)) => Err((place, Problem::ParenthesisMissing)),
            None => {
                let end = self.text.len();
                Err((end..end, Problem::ParenthesisMissing))
            }
        }
    }

    fn with_fields(&mut self, mut of: Node) -> Result<Node, Wrong> {
        while let Some((place, Token::Field(field))) = self.peek() {
            let (place, field) = (of.place.start..place.end, *field);
            self.next += 1;
            of = node(place, NodeKind::Field(Box::new(of), field))?;
        }
        Ok(of)
    }
}

/// Returns two operands with an operator between them. A row of `&&`, or of `||`, becomes a tree with few levels, which is
/// evaluated in the same order.
fn joined(operator: Operator, left: Node, right: Node) -> Result<Node, Wrong> {
    let place = left.place.start..right.place.end;
    let is_row = matches!(operator, Operator::And | Operator::Or);
    let (left, right) = match left.kind {
        NodeKind::Binary(of_left, first, second)
            // Without parentheses.
            if is_row && of_left == operator && left.place.end == second.place.end
                && second.depth < first.depth =>
        {
            (*first, joined(operator, *second, right)?)
        }
        kind => (Node { kind, ..left }, right),
    };
    node(
        place,
        NodeKind::Binary(operator, Box::new(left), Box::new(right)),
    )
}

fn node(place: Range<usize>, kind: NodeKind) -> Result<Node, Wrong> {
    let mut node = Node {
        place,
        kind,
        depth: 1,
    };
    node.depth += node.parts().map(|part| part.depth).max().unwrap_or(0);
    if node.depth > MAX_DEPTH {
        return Err((node.place, Problem::TooDeep));
    }
    Ok(node)
}
