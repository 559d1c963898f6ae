//! The layouts that are written here by hand, beside what a C compiler makes of the headers that are installed.

use std::fmt::Write;
use std::process::Command;

use towline_ffi::ucx::abi::{LAYOUTS, Layout};

use crate::skips;

/// A program that prints each size and place as [`expected`] does.
fn program(include: &str, layouts: &[Layout]) -> String {
    let mut text =
        format!("#include <{include}>\n#include <stdio.h>\n#include <stddef.h>\nint main(void) {{\n");
    for (name, _, fields) in layouts {
        writeln!(text, "printf(\"{name} %zu\\n\", sizeof({name}));").unwrap();
        for (field, _) in *fields {
            writeln!(text, "printf(\"{name}.{field} %zu\\n\", offsetof({name}, {field}));").unwrap();
        }
    }
    text + "return 0; }\n"
}

fn expected(layouts: &[Layout]) -> String {
    let mut text = String::new();
    for (name, size, fields) in layouts {
        writeln!(text, "{name} {size}").unwrap();
        for (field, at) in *fields {
            writeln!(text, "{name}.{field} {at}").unwrap();
        }
    }
    text
}

#[test]
fn ucx_layouts_are_those_of_the_installed_headers() {
    let folder = tempfile::tempdir().unwrap();
    let (source, binary) = (folder.path().join("layout.c"), folder.path().join("layout"));
    std::fs::write(&source, program("ucp/api/ucp.h", LAYOUTS)).unwrap();
    // `CPATH`, which the compiler reads, may name headers that are elsewhere.
    let compiled = Command::new("cc").arg("-o").arg(&binary).arg(&source).output().unwrap();
    if !compiled.status.success() {
        let said = String::from_utf8_lossy(&compiled.stderr);
        assert!(said.contains("ucp/api/ucp.h: No such file"), "{said}");
        return skips::note("UCX headers", "ucp/api/ucp.h is not installed (apt-get install libucx-dev)");
    }
    let printed = Command::new(&binary).output().unwrap();
    assert_eq!(String::from_utf8(printed.stdout).unwrap(), expected(LAYOUTS));
}
