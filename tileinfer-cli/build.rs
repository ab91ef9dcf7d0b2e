//! Takes kernel packs into the program: all `*.pack` files in the folder that `TILEINFER_PACK_DIR` names when the
//! feature `cuda` is built. Without that variable none are, and the program looks for them beside itself. Whether
//! a pack fits the program is seen when it starts.

use std::path::{Path, PathBuf};

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=TILEINFER_PACK_DIR");
    let variable = |name| PathBuf::from(std::env::var_os(name).expect("cargo sets it"));
    let folder = std::env::var_os("TILEINFER_PACK_DIR")
        .filter(|folder| !folder.is_empty() && std::env::var_os("CARGO_FEATURE_CUDA").is_some());
    let packs = folder.map_or(Vec::new(), |folder| {
        // Build scripts run in the package's folder, people in the workspace's.
        packs(&variable("CARGO_MANIFEST_DIR").join("..").join(folder))
    });
    let list: String = packs
        .iter()
        .map(|pack| format!("include_bytes!({pack:?}),\n"))
        .collect();
    std::fs::write(variable("OUT_DIR").join("packs.rs"), format!("&[{list}]"))
        .expect("cargo's folder for the output takes files");
}

/// The packs in a folder.
fn packs(folder: &Path) -> Vec<PathBuf> {
    let entries = folder.read_dir().unwrap_or_else(|error| {
        panic!(
            "TILEINFER_PACK_DIR: cannot read {}: {error}",
            folder.display()
        )
    });
    let mut packs: Vec<PathBuf> = entries
        .map(|entry| entry.expect("a folder that was just opened").path())
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == "pack")
        })
        .map(|path| path.canonicalize().expect("a file that was just listed"))
        .collect();
    assert!(
        !packs.is_empty(),
        "TILEINFER_PACK_DIR: {} holds no kernel pack; `cargo xtask kernels` makes them",
        folder.display()
    );
    for pack in &packs {
        println!("cargo:rerun-if-changed={}", pack.display());
    }
    packs.sort();
    packs
}
