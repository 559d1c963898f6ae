//! The page of NIXL's vocabulary: that the tests it cites are there, and that every line has one or says why not.

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
fn every_line_of_the_page_of_parity_is_declined_or_cites_tests_that_exist() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut code = String::new();
    for folder in ["towline-fabric", "towline-wire", "towline/src"] {
        sources(&crates.join(folder), &mut code);
    }
    let page = std::fs::read_to_string(crates.join("../docs/nixl-parity.md")).unwrap();
    // What lies between the line under a table's head and the table's end.
    let mut lines = page.lines();
    let mut count = 0;
    while lines.any(|line| line.starts_with("| ---")) {
        for line in lines.by_ref().take_while(|line| line.starts_with("| ")) {
            let cells: Vec<&str> = line.trim_matches('|').split(" | ").collect();
            let cited: Vec<&str> = cells.last().unwrap().split('`').skip(1).step_by(2).collect();
            assert!(!cited.is_empty() || line.contains("**Declined**"), "{line}: neither shown nor declined");
            for test in cited {
                assert!(code.contains(&format!("fn {test}()")), "{test} is no test: {line}");
            }
            count += 1;
        }
    }
    assert!(count > 40, "the tables are read: {count}");
}
