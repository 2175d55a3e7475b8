use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

/// A hit with these arguments, and words of memory by address.
struct Recorded {
    arguments: Vec<u64>,
    memory: BTreeMap<u64, u64>,
}

impl Hit for Recorded {
    fn argument(&self, index: usize) -> Option<u64> {
        self.arguments.get(index).copied()
    }

    fn word_at(&self, address: u64) -> Option<u64> {
        self.memory.get(&address).copied()
    }
}

fn scope() -> Scope {
    let parameter = |name: Option<&str>, kind| Parameter {
        name: name.map(str::to_owned),
        kind,
    };
    let parameters = vec![
        parameter(Some("request"), ParameterKind::Value),
        parameter(None, ParameterKind::Value),
        parameter(Some("size"), ParameterKind::Word),
        parameter(None, ParameterKind::Float),
        parameter(
            None,
            ParameterKind::Number {
                bits: 16,
                signed: true,
            },
        ),
        parameter(None, ParameterKind::Unread),
    ];
    Scope::of("probe req_start", "req_start", parameters)
}

const fn int(number: i64) -> u64 {
    (number << 1) as u64 | 1
}

const AT: u64 = 0x7f00_0000_1000;

/// Puts a block at an address.
fn block(memory: &mut BTreeMap<u64, u64>, at: u64, tag: u64, words: &[u64]) {
    memory.insert(at - 8, (words.len() as u64) << 10 | tag);
    memory.extend((0..).map(|index| at + 8 * index).zip(words.iter().copied()));
}

/// Returns the answer for a hit whose first two arguments are these.
fn answered(expression: &str, arguments: [u64; 2]) -> Answer {
    let [one, other] = arguments;
    let small = 0xabcd_0000_0000_fffe;
    let arguments = vec![one, other, 0xffff_ffff_ffff_fff0, 2.5_f64.to_bits(), small];
    let mut memory = BTreeMap::new();
    block(&mut memory, AT, 252, &typed::block_of(b"GET /index"));
    block(&mut memory, AT + 0x100, 253, &[1.5_f64.to_bits()]);
    block(&mut memory, AT + 0x200, 0, &[int(7), AT, AT + 0x100]);
    block(&mut memory, AT + 0x300, 254, &[0, 0, 0, 0]);
    block(&mut memory, AT + 0x400, 252, &typed::block_of(b"12345678"));
    // A string whose last word cannot be read.
    memory.insert(AT + 0x500 - 8, 2 << 10 | 252);
    memory.insert(AT + 0x500, u64::from_le_bytes(*b"12345678"));
    let hit = Recorded { arguments, memory };
    let expression: Expression = expression.parse().unwrap();
    expression.filter(&scope()).unwrap().answer(&hit)
}

#[test]
fn operators_bind_as_in_rust() {
    for (expression, number) in [
        ("arg0 == 1 + 2 * 3", 7),
        ("arg0 == (1 + 2) * 3", 9),
        ("arg0 == 10 - 3 - 2", 5),
        ("arg0 == 6 & 2 + 1", 2),
        ("arg0 & 6 == 2", 3),
        ("arg0 + 2 >> 1 == 5", 8),
        ("arg0 == 0 - -5", 5),
        ("arg0 == -(2 + 3)", -5),
        ("arg0 == 'A' && 0x10 == 16", 65),
        ("arg0 == 1 || arg0 == 2 && arg0 == 3", 1),
        ("!(arg0 == 1) && !(arg0 == 2 || arg0 == 3)", 4),
        ("!!(request == 9)", 9),
    ] {
        let answer = answered(expression, [int(number), 0]);
        assert_eq!(answer, Answer::True, "{expression}");
        let other = answered(expression, [int(100), 0]);
        let both = expression.starts_with("!(");
        assert_eq!(other == Answer::True, both, "{expression}");
    }
}

#[test]
fn ocaml_values_are_read_as_compared() {
    let (text, float, block, floats) = (AT, AT + 0x100, AT + 0x200, AT + 0x300);
    for (expression, value, expected) in [
        ("arg0 == -3", int(-3), Answer::True),
        ("arg0 < 4611686018427387904", int(-1), Answer::True),
        ("arg0 == 3", text, Answer::Untyped),
        ("arg0 == \"GET /index\"", text, Answer::True),
        ("arg0 != \"GET /index\"", text, Answer::False),
        ("\"GET /inde\" == arg0", text, Answer::False),
        ("arg0 == \"GET /index\"", block, Answer::Untyped),
        ("arg0 == \"GET /index\"", int(0), Answer::Untyped),
        ("arg0 ^= \"GET\"", text, Answer::True),
        ("arg0 ^= \"\"", text, Answer::True),
        ("arg0 ^= \"GET /index\"", text, Answer::True),
        ("arg0 ^= \"GET /index \"", text, Answer::False),
        ("arg0 ^= \"GET /index and so on\"", text, Answer::False),
        ("arg0 ^= \"12345678\"", AT + 0x400, Answer::True),
        ("arg0 == \"12345678\"", AT + 0x400, Answer::True),
        ("arg0 == \"1234567\"", AT + 0x400, Answer::False),
        ("arg0 ^= \"123\"", AT + 0x500, Answer::True),
        ("arg0 ^= \"12345678\"", AT + 0x500, Answer::Untyped),
        ("len(arg0) == 10", text, Answer::True),
        ("len(arg0) == 3", block, Answer::True),
        ("len(arg0) == 4", floats, Answer::True),
        ("len(arg0) == 0", int(0), Answer::Untyped),
        ("len(arg0) == 1", float, Answer::Untyped),
        ("len(str(arg0)) > 8", text, Answer::True),
        ("tag(arg0) == 252", text, Answer::True),
        ("tag(arg0) == 1000", int(5), Answer::True),
        ("tag(arg0) == 0", 2, Answer::Untyped),
        ("arg0 == 1.5", float, Answer::True),
        ("float(arg0) > 1", float, Answer::True),
        ("arg0 < -1.5", float, Answer::False),
        ("arg0 == 1.5", text, Answer::Untyped),
        ("arg0 == 1.5", int(1), Answer::Untyped),
        ("arg0.0 == 7", block, Answer::True),
        ("arg0.1 ^= \"GET \"", block, Answer::True),
        ("arg0.2 > 1.", block, Answer::True),
        ("arg0.3 == 7", block, Answer::Untyped),
        ("arg0.0 == 7", floats, Answer::Untyped),
        ("arg0.0 == 7", int(7), Answer::Untyped),
        ("u64(arg0) == 15", int(7), Answer::True),
        ("arg0 == arg1", int(7), Answer::True),
        ("arg0 == 1 && tag(arg0) == 5", 8, Answer::Untyped),
        ("probe == \"req_start\" || arg0 == 1", 8, Answer::True),
        ("probe ^= \"req\" && probe != \"req_end\"", 8, Answer::True),
    ] {
        assert_eq!(
            answered(expression, [value, int(7)]),
            expected,
            "{expression}"
        );
    }
}

#[test]
fn words_and_numbers_have_their_size() {
    for expression in [
        "size == -16",
        "size < 0",
        "u64(size) > 0x7fffffffffffffff",
        "u64(size) == 0xfffffffffffffff0",
        "int(size) == -16",
        "size >> 1 == -8",
        "u64(size) >> 60 == 15",
        "u64(size & 0xff) == 0xf0",
        "arg3 == 2.5",
        "arg3 > 2",
        "arg4 == -2",
        "u64(arg4) > 5",
    ] {
        assert_eq!(answered(expression, [0; 2]), Answer::True, "{expression}");
    }
}

#[test]
fn integers_have_values_and_signs() {
    for (expression, first, expected, is_signed) in [
        ("arg0", int(-3), Some(-3), true),
        ("request * 2 + 1", int(20), Some(41), true),
        ("arg0", AT, None, true),
        ("u64(arg0)", int(3), Some(7), false),
        ("u64(arg0) >> 1", u64::MAX, Some(i64::MAX), false),
        ("size", 0, Some(-16), true),
        ("int(size)", 0, Some(-16), true),
        ("arg4", 0, Some(-2), true),
        ("42", 0, Some(42), true),
        ("-1", 0, Some(-1), true),
        ("0xffffffffffffffff", 0, Some(-1), false),
        ("'A' & 3", 0, Some(1), true),
    ] {
        let arguments = vec![first, 0, 0xffff_ffff_ffff_fff0, 0, 0xabcd_0000_0000_fffe];
        let memory = BTreeMap::new();
        let hit = Recorded { arguments, memory };
        let parsed: Expression = expression.parse().unwrap();
        let integer = parsed.integer(&scope()).unwrap();
        let expected = expected.map(|it: i64| it as u64);
        assert_eq!(integer.value(&hit), expected, "{expression}");
        assert_eq!(integer.is_signed(), is_signed, "{expression}");
    }
}

#[test]
fn rows_of_alternatives_are_not_nested() {
    for operator in ["||", "&&"] {
        let row = ["arg0==8"; MAX_LEN / 9].join(operator);
        assert_eq!(answered(&row, [int(8), 0]), Answer::True);
        assert_eq!(answered(&row, [int(7), 0]), Answer::False);
    }
    // The longest row there is.
    let row = "1||".repeat(MAX_LEN / 3) + "1";
    let parsed: Expression = row.parse().unwrap();
    assert!(parsed.filter(&scope()).is_err());
    let mixed = "arg0 == 1 && arg0 == 2 || ".repeat(100) + "arg0 == 3";
    assert!(mixed.parse::<Expression>().is_ok());
}

// Each message in its full shape, with the mark below the place.
#[test]
fn messages_are_golden() {
    let deep = format!("{}arg0 == 1{}", "(".repeat(70), ")".repeat(70));
    let chain = "1 + ".repeat(70) + "arg0 == 1";
    let wide = "arg0 == 1 && ".repeat(20) + "arg0 == request2";
    let long = format!("arg0 == \"{}\"", "x".repeat(65));
    let tree = (0..5).fold("size".to_owned(), |tree, _| format!("({tree} + {tree})"));
    let calculated = format!("{tree} == {tree}");
    let spaces = " ".repeat(MAX_LEN + 1);
    let trailing_spaces = format!("arg0 == 1{spaces}");
    let spaces_inside = format!("arg0 =={spaces}1");
    let longer = format!("{}arg0 == 1", "arg0 == 1 && ".repeat(MAX_LEN / 13));
    let expressions = [
        "",
        "  ",
        &spaces,
        &trailing_spaces,
        &spaces_inside,
        &longer,
        &deep,
        &chain,
        &wide,
        &long,
        &calculated,
        "arg0 # 1",
        "arg0 == é",
        "arg0 = 5",
        "arg0 / 2 == 1",
        "arg0 % 2 == 1",
        "arg0 << 1 == 2",
        "arg0 <> 1",
        "arg0 === 1",
        "arg0 | arg1",
        "arg0 ^ 1",
        "~arg0",
        "arg0 == \"GET",
        "arg0 == 'c",
        "arg0 == 'ab'",
        "arg0 == ''",
        "arg0 == \"a\\q\"",
        "arg0 == \"\\300\"",
        "arg0 == \"\\x4\"",
        "arg0 == 18446744073709551616",
        "arg0 == 0x10000000000000000",
        "arg0 == 0xfg",
        "arg0 == 0x",
        "arg0 == 12ab3",
        "arg0 == -9223372036854775809",
        "arg0 == 1e999",
        "elapsed > 5min",
        "elapsed > 300000000000s",
        "arg0 == 5min",
        "arg0 ==",
        "== 5",
        "arg0 == )",
        "arg0 == 1)",
        "(arg0 == 1",
        "(arg0 == 1 arg1",
        "arg0 arg1",
        "arg0 == 1 2",
        "0 < arg0 < 5",
        "arg0.x == 1",
        "arg0. == 1",
        "arg0.4294967296 == 1",
        "lenn(arg0) == 1",
        "foo(arg0) == 1",
        "requst == 1",
        "sizes == 1",
        "nothing == 1",
        "arg7 == 1",
        "arg10 == 1",
        "arg5 == 1",
        "caller == 1",
        "tid == 1.5",
        "retval == 1",
        "elapsed > 10ms",
        "arg0 > 10ms",
        "arg0",
        "arg0 && arg1",
        "!arg0",
        "int(arg0) == 1.5",
        "size == 1.5",
        "size == \"GET\"",
        "len(str(size)) == 3",
        "str(size) < \"GET\"",
        "str(size) == str(size)",
        "float(size) == 1.",
        "arg3 + 1 == 2",
        "arg0 + \"a\" == 1",
        "\"a\" == 1",
        "arg0 < \"GET\"",
        "arg0 == str(arg1)",
        "arg0 ^= arg1",
        "size ^= \"a\"",
        "arg0 ^= 5",
        "u64(size) == arg0",
        "u64(size) > -1",
        "(arg0 == 1) == 1",
        "arg0 >> arg1 == 1",
        "arg0 >> 64 == 1",
        "size.1 == 1",
        "(arg0 + 1).0 == 1",
        "tag(size) == 1",
        "len(5) == 1",
        "-1.5.0 == 1",
        "-\"a\" == 1",
        "u64(\"a\") == 1",
        "int(1.5) == 1",
    ];
    let mut text = String::new();
    let scope = scope();
    for expression in expressions {
        let parsed: Result<Expression, _> = expression.parse();
        let error = parsed.and_then(|parsed| parsed.filter(&scope)).unwrap_err();
        text += &format!("{error}\n{}\n", error.marked());
    }
    for expression in [
        "elapsed == 10ms",
        "elapsed > 10",
        "elapsed > 10ms || arg0 == 1",
        "!(elapsed > 10ms)",
        "elapsed + 1ms > 10ms",
        "arg0 > elapsed",
    ] {
        let parsed: Expression = expression.parse().unwrap();
        let error = parsed.split_times().unwrap_err();
        text += &format!("{error}\n{}\n", error.marked());
    }
    let exits = Scope::of_exits("function f", "f", ParameterKind::Word);
    for expression in ["retval == arg1", "retval == \"GET\"", "request == 1"] {
        let parsed: Expression = expression.parse().unwrap();
        let error = parsed.filter(&exits).unwrap_err();
        text += &format!("{error}\n{}\n", error.marked());
    }
    for scope in [
        Scope::without_arguments("function f", "f"),
        Scope::of("probe tick", "tick", Vec::new()),
    ] {
        for expression in ["arg0 == 1", "request == 1"] {
            let parsed: Expression = expression.parse().unwrap();
            let error = parsed.filter(&scope).unwrap_err();
            text += &format!("{error}\n{}\n", error.marked());
        }
    }
    for expression in [
        "arg3",
        "float(arg0)",
        "1.5",
        "\"GET\"",
        "str(arg0)",
        "10ms",
        "arg0 == 1",
        "!(arg0 == 1)",
        "arg7",
        "requst",
        "arg5",
        "caller",
        &tree,
    ] {
        let parsed: Expression = expression.parse().unwrap();
        let error = parsed.integer(&scope).unwrap_err();
        text += &format!("{error}\n{}\n", error.marked());
    }
    let much: Expression = "arg0 == 1 && arg1 == \"GET\"".parse().unwrap();
    let error = much.bad(ExpressionProblem::TooMuchCode {
        given: 10_000,
        most: 8192,
    });
    text += &format!("{error}\n{}\n", error.marked());
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/src/expression/messages.txt");
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(file, &text).unwrap();
    }
    let golden = std::fs::read_to_string(file).unwrap();
    assert!(
        golden == text,
        "not as in {file}; UPDATE_GOLDEN=1 rewrites it:\n{text}"
    );
}

#[test]
fn times_and_escapes_are_read() {
    use super::lexer::{Token, tokens};
    let one = |text: &str| {
        let tokens = tokens(text).unwrap();
        assert_eq!(tokens.len(), 1, "{text}");
        assert_eq!(tokens[0].0, 0..text.len(), "{text}");
        tokens[0].1.clone()
    };
    for (text, token) in [
        ("10ms", Token::Time(10_000_000)),
        ("1.5us", Token::Time(1_500)),
        ("2s", Token::Time(2_000_000_000)),
        ("7ns", Token::Time(7)),
        ("1e3", Token::Float(1000.0)),
        ("1.", Token::Float(1.0)),
        ("1.5e-1", Token::Float(0.15)),
        ("'\\n'", Token::Number(10)),
        ("'\\''", Token::Number(39)),
        ("'\"'", Token::Number(34)),
        (
            r#""\"\\\t\r\b\065\x41é""#,
            Token::Text("\"\\\t\r\x08AAé".into()),
        ),
        (".12", Token::Field(12)),
        ("x'_1", Token::Name("x'_1".to_owned())),
        ("M.N_0.x", Token::Name("M.N_0.x".to_owned())),
    ] {
        assert_eq!(one(text), token, "{text}");
    }
}

/// Checks that a text is an expression, or that the error says where it is not.
fn check(text: &str) {
    let read = text.parse::<Expression>();
    if let Err(error) = read.and_then(|read| read.filter(&scope())) {
        let place = error.place();
        assert!(place.start <= place.end && text.get(place).is_some());
        assert!(error.to_string().len() < 5000 && error.marked().len() < 1000);
    }
}

#[test]
fn corpus_is_read_or_refused() {
    let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/expressions");
    let mut many = 0;
    for file in std::fs::read_dir(corpus).unwrap() {
        let bytes = std::fs::read(file.unwrap().path()).unwrap();
        check(&String::from_utf8_lossy(&bytes));
        many += 1;
    }
    assert!(many > 0);
}

proptest! {
    // promise: Observations: Any text is an expression, or an error whose place is in it (256 random texts)
    #[test]
    fn any_text_is_read_or_refused(
        words in proptest::collection::vec(
            proptest::sample::select(&[
                "arg0", "request", "size", "arg3", "probe", "len(", "str(", "u64(", "int(", "(", ")", ".0",
                "==", "<", "^=", "&&", "||", "!", "-", "+", "*", "&", ">>", "1", "1.5", "10ms", "\"GET\"", "'c'",
                "é", "\\", "\"", "'", "0x", "99999999999999999999", " ",
            ][..]),
            0..24,
        ),
    ) {
        let text = words.join(" ");
        check(&text);
    }
}

#[test]
fn texts_of_c_need_the_kernel() {
    let word = Parameter {
        name: None,
        kind: ParameterKind::Word,
    };
    let scope = Scope::of("function f", "f", vec![word]);
    let text: Expression = "str(arg0) == \"GET\"".parse().unwrap();
    assert!(text.filter(&scope).is_ok());
    let error = text.filter(&scope.asking_kernel_if(false)).unwrap_err();
    assert_eq!(error.problem(), &ExpressionProblem::UnreadText);
}
