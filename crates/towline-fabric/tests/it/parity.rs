//! The table of NIXL's vocabulary: that the tests it cites are there.

use std::path::Path;

fn sources(folder: &Path, text: &mut String) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, text);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            text.push_str(&std::fs::read_to_string(&path).unwrap());
        }
    }
}

#[test]
fn every_test_that_the_table_of_parity_cites_exists() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut code = String::new();
    for folder in ["towline-fabric/src", "towline-fabric/tests", "towline-wire/src", "towline-wire/tests"] {
        sources(&crates.join(folder), &mut code);
    }
    let page = std::fs::read_to_string(crates.join("../docs/nixl-parity.md")).unwrap();
    let cited: Vec<&str> = page
        .lines()
        .filter(|line| line.starts_with("| ") && line.matches(" | ").count() == 3)
        .filter_map(|line| line.rsplit(" | ").next())
        .flat_map(|cell| cell.split('`').skip(1).step_by(2))
        .collect();
    assert!(cited.len() > 30, "the table is read: {}", cited.len());
    for test in cited {
        assert!(code.contains(&format!("fn {test}()")), "docs/nixl-parity.md cites {test}, which is no test");
    }
}
