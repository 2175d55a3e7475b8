//! include/probes.h is what cbindgen makes of the source.

use std::path::Path;
use std::{env, fs};

#[test]
fn header_equals_the_one_generated_from_the_source() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(directory.join("cbindgen.toml")).unwrap();
    let bindings = cbindgen::Builder::new()
        .with_config(config)
        .with_src(directory.join("src/types.rs"))
        .with_src(directory.join("src/abi.rs"))
        .generate()
        .unwrap();
    let mut generated = Vec::new();
    bindings.write(&mut generated);
    let generated = String::from_utf8(generated).unwrap();
    let header = directory.join("include/probes.h");
    if env::var_os("UPDATE_GOLDEN").is_some() {
        fs::write(&header, &generated).unwrap();
    }
    let committed = fs::read_to_string(&header).unwrap();
    assert!(
        committed == generated,
        "{} is out of date; run this test with UPDATE_GOLDEN=1 to rewrite it, as:\n{generated}",
        header.display()
    );
}
