//! Makes `bindings.rs` from the installed `slurm/spank.h` and decides which
//! Slurm release the plugin is stamped for.
//!
//! Since 21.08 Slurm loads a SPANK plugin only if the major and minor number
//! in its `plugin_version` equal its own (`src/common/plugin.c`), while the
//! rest of the ABI has not changed since. So without a header, or without
//! libclang, the committed bindings serve for every release, and
//! `PALINGENESIS_SLURM=24.05` stamps the library for another release.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

include!("packaging/sysroot.rs");

const COMMITTED: &str = "src/spank/bindings.rs";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed={COMMITTED}");
    println!("cargo::rerun-if-changed=packaging/sysroot.rs");
    link_with_sysroot();
    // For programs that link with it; Slurm opens its plugins by their paths. The number
    // grows when include/palingenesis.h changes in a way that breaks them.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libpalingenesis.so.0");
    println!("cargo::rerun-if-env-changed=SLURM_INCLUDE_DIR");
    println!("cargo::rerun-if-env-changed=PALINGENESIS_SLURM");

    let committed = fs::read_to_string(COMMITTED).unwrap_or_default();
    let generated = include_dir().and_then(|dir| generate(&dir));
    let (bindings, source) = match generated {
        Some(text) => (text, "header"),
        None => (committed, "committed"),
    };
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    fs::write(out.join("bindings.rs"), &bindings).expect("OUT_DIR is writable");

    let version = match env::var("PALINGENESIS_SLURM") {
        Ok(release) if !release.is_empty() => parse_release(&release).unwrap_or_else(|| {
            panic!("PALINGENESIS_SLURM={release}: not a Slurm release; write it as 24.05 or 24.05.3")
        }),
        _ => version_in(&bindings).expect("the bindings hold SLURM_VERSION_NUMBER"),
    };
    println!("cargo::rustc-env=PALINGENESIS_PLUGIN_VERSION={version}");
    println!("cargo::rustc-env=PALINGENESIS_BINDINGS_FROM={source}");
}

/// The directory that holds `slurm/spank.h`: `SLURM_INCLUDE_DIR`, pkg-config's
/// answer, then `/usr/include`.
fn include_dir() -> Option<PathBuf> {
    let has_header = |dir: &Path| dir.join("slurm/spank.h").is_file();
    if let Some(dir) = env::var_os("SLURM_INCLUDE_DIR").filter(|dir| !dir.is_empty()) {
        let dir = PathBuf::from(dir);
        if has_header(&dir) {
            return Some(dir);
        }
        println!(
            "cargo::warning=SLURM_INCLUDE_DIR={}: no slurm/spank.h there; using the committed bindings",
            dir.display()
        );
        return None;
    }
    let from_pkg_config = Command::new("pkg-config")
        .args(["--variable=includedir", "slurm"])
        .output()
        .ok()
        .filter(|answer| answer.status.success())
        .map(|answer| PathBuf::from(String::from_utf8_lossy(&answer.stdout).trim()))
        .filter(|dir| has_header(dir));
    let found = from_pkg_config.or_else(|| Some(PathBuf::from("/usr/include")).filter(|dir| has_header(dir)));
    if found.is_none() {
        // A header installed later is to be noticed: it stamps another release.
        println!("cargo::rerun-if-changed=/usr/include");
    }
    found
}

/// `None` when libclang is missing or the header is older than 21.08.
fn generate(dir: &Path) -> Option<String> {
    let header = dir.join("slurm/spank.h");
    println!("cargo::rerun-if-changed={}", header.display());
    println!("cargo::rerun-if-changed={}", dir.join("slurm/slurm_version.h").display());
    // spank.h has an enum and a function both named `spank_context`; the
    // functions are found by dlsym, so only types and constants are wanted.
    let builder = bindgen::Builder::default()
        .header(header.to_string_lossy())
        .clang_arg(format!("-I{}", dir.display()))
        .allowlist_type("spank_(item|item_t|context|context_t|option|opt_cb_f|handle|t)")
        .allowlist_var("SLURM_VERSION_NUMBER|SPANK_OPTION_MAXLEN")
        .ignore_functions()
        .prepend_enum_name(false)
        .disable_header_comment()
        .layout_tests(false)
        .formatter(bindgen::Formatter::Prettyplease);
    // clang-sys panics when it finds no libclang.
    let quiet = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| builder.generate()));
    std::panic::set_hook(quiet);
    match outcome {
        Ok(Ok(bindings)) => {
            let text = bindings.to_string();
            version_in(&text).map(|_| text)
        }
        Ok(Err(error)) => {
            println!("cargo::warning=bindgen: {error}; using the committed bindings");
            None
        }
        Err(_) => {
            println!("cargo::warning=libclang not found (Debian: libclang-dev); using the committed bindings");
            None
        }
    }
}

fn version_in(bindings: &str) -> Option<u32> {
    let rest = bindings.split("SLURM_VERSION_NUMBER: u32 = ").nth(1)?;
    rest.split(';').next()?.trim().parse().ok()
}

/// "24.05" or "24.05.3" as Slurm's `SLURM_VERSION_NUM(a,b,c)`.
fn parse_release(release: &str) -> Option<u32> {
    let mut parts = release.split('.').map(|part| part.parse::<u32>().ok().filter(|n| *n < 256));
    let major = parts.next()??;
    let minor = parts.next()??;
    let micro = parts.next().unwrap_or(Some(0))?;
    (major >= 20 && parts.next().is_none()).then_some((major << 16) | (minor << 8) | micro)
}
