//! What `watch` shows of the values of `compound`, which are made of others.

use std::io::Read;
use std::process::Stdio;

use test_support::{Guard, Talker, eventually};

use crate::support::{command, run};

const SHOWN: &str = r#"exceptions none=Not_found failure=Failure "boom" own=Dune__exe__Compound.Own (3, "three") bare=Dune__exe__Compound.Bare circle=Dune__exe__Compound.Circle (2.5) system=Unix.Unix_error (<0:1>, "open", "file")
bigarrays matrix=<bigarray float64 c 3x4> text=<bigarray char fortran 5> five=<bigarray int16_signed c 1x2x3x4x...> none=<bigarray int32 c> pair=(<custom _bigarr02>, 1)
lists texts=["a"; "bc"] one=(5, 0) long=[0; 1; 2; 3; 4; 5; 6; 7; 8; 9; 10; 11; 12; 13; 14; 15; 16; 17; 18; 19; ...] circle=[1; 2; 1; 2; 1; 2; 1; 2; 1; 2; 1; 2; 1; 2; 1; 2; 1; 2; 1; 2; ...] pairs=[<0:2>; <0:2>] nested=(1, (2, 3))
others some=("x") bad=<1>("bad") tag=(4198970, 3) mixed=("it", 0.5, 7L, <0:1>, <closure>) later=lazy 7 strings=("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"..., "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"..., "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"..., "aaaaaaaa"...)
"#;

/// Asserts that the values of the program are shown as what they are.
pub(crate) fn assert_shown(program: &mut Talker, pid: i32) {
    let pid = pid.to_string();
    let shown = eventually("its values are in memory that is read", || {
        let mut tool = command(["watch", "-quiet", "-regexp", ".", "-limit", "4"]);
        tool.args(["-fields", "name,args", "-pid", &pid]);
        let mut tool = Guard::spawn(tool.stdout(Stdio::piped()));
        eventually("its sites are observed", || {
            let info = run(&format!("info -pid {pid}"));
            info.stderr.contains("observed").then_some(())
        });
        program.ask("run", "hits");
        let mut shown = String::new();
        let output = tool.child().stdout.as_mut().unwrap();
        output.read_to_string(&mut shown).unwrap();
        assert!(tool.wait().success());
        // Memory that was just mapped is not read yet.
        (!shown.contains("0x")).then_some(shown)
    });
    assert_eq!(shown, SHOWN);
}
