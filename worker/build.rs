//! Links what packages hold against an older glibc, where that is asked for.

include!("../packaging/sysroot.rs");

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=../packaging/sysroot.rs");
    link_with_sysroot();
}
