// Included by the build scripts of what packages hold: with PALINGENESIS_SYSROOT, the
// tree of an older glibc (packaging/sysroot makes one), release builds are linked
// against that one and run with it and all newer ones.

/// Tells cargo so, or nothing where it is not asked for.
fn link_with_sysroot() {
    println!("cargo::rerun-if-env-changed=PALINGENESIS_SYSROOT");
    let release = std::env::var("PROFILE").is_ok_and(|profile| profile == "release");
    let Some(root) = std::env::var("PALINGENESIS_SYSROOT").ok().filter(|root| release && !root.is_empty()) else {
        return;
    };
    let machine = std::env::var("CARGO_CFG_TARGET_ARCH").unwrap_or_default();
    let libraries = format!("{root}/usr/lib/{machine}-linux-gnu");
    assert!(
        std::path::Path::new(&libraries).join("libc.so").is_file(),
        "PALINGENESIS_SYSROOT={root}: no libc.so in {libraries}; packaging/sysroot makes such a tree"
    );
    println!("cargo::rerun-if-changed={libraries}/libc.so");
    // gcc looks below the sysroot for what it knows, and not for Debian's directory.
    println!("cargo::rustc-link-arg=--sysroot={root}");
    println!("cargo::rustc-link-arg=-L{libraries}");
}
