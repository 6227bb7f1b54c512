//! Where CUDA's libraries are looked for, and in which order: trees made of small files that
//! begin as libraries do.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use palingenesis::facts::Environment;
use palingenesis::facts::cuda::{Found, Libraries, Rule, find};

/// A machine's directories below a temporary one.
struct Machine(tempfile::TempDir);

/// What the loader takes for a library of this processor, as elf(5) has it.
fn header(machine: u16) -> Vec<u8> {
    let mut bytes = vec![0; 64];
    bytes[..5].copy_from_slice(&[0x7f, b'E', b'L', b'F', 2]);
    bytes[18..20].copy_from_slice(&machine.to_le_bytes());
    bytes
}

const OWN: u16 = if cfg!(target_arch = "aarch64") { 183 } else { 62 };
const OTHER: u16 = if cfg!(target_arch = "aarch64") { 62 } else { 183 };

impl Machine {
    fn new() -> Machine {
        Machine(tempfile::tempdir().unwrap())
    }

    fn at(&self, path: &str) -> PathBuf {
        let path = self.0.path().join(path.trim_start_matches('/'));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        path
    }

    fn library(&self, path: &str) {
        fs::write(self.at(path), header(OWN)).unwrap();
    }

    fn link(&self, path: &str, to: &str) {
        symlink(to, self.at(path)).unwrap();
    }

    /// NVRTC with its builtins.
    fn nvrtc(&self, directory: &str, version: &str) {
        self.library(&format!("{directory}/libnvrtc.so.{version}"));
        self.library(&format!("{directory}/libnvrtc-builtins.so.{version}"));
    }

    fn find(&self, configured: Option<&str>, variables: &[(&str, &str)]) -> Libraries {
        let own = variables.iter().map(|(name, value)| (name.to_string(), value.to_string()));
        find(self.0.path(), configured.map(Path::new), &Environment::from_iter(own))
    }
}

fn found(path: &str, version: &str, by: Rule) -> Found {
    Found { path: path.into(), version: version.into(), by }
}

#[test]
fn the_rules_go_before_each_other_in_their_order() {
    let machine = Machine::new();
    let variables = [
        ("LD_LIBRARY_PATH", ":/loaded::relative:/loaded"),
        ("VIRTUAL_ENV", "/venv"),
        ("HOME", "/home/ada"),
        ("CUDA_HOME", ""),
    ];
    let places = [
        ("/usr/lib/python3/dist-packages/nvidia/nccl/lib", Rule::Python),
        ("/home/ada/.local/lib/python3.11/site-packages/nvidia/nccl/lib", Rule::Python),
        ("/venv/lib/python3.9/site-packages/nvidia/nccl/lib", Rule::Python),
        ("/venv/lib/python3.12/site-packages/nvidia/nccl/lib", Rule::Python),
        ("/usr/lib64", Rule::Loader),
        ("/usr/local/cuda-9.2/lib64", Rule::Toolkit),
        ("/usr/local/cuda-12.10/lib64", Rule::Toolkit),
        ("/usr/local/cuda/lib64", Rule::Toolkit),
        ("/loaded", Rule::LibraryPath),
        ("/named", Rule::Configured),
    ];
    for (place, rule) in places {
        machine.library(&format!("{place}/libnccl.so.2"));
        let path = format!("{place}/libnccl.so.2");
        assert_eq!(machine.find(Some("/named"), &variables).nccl.unwrap(), found(&path, "2", rule), "{place}");
    }
}

#[test]
fn what_the_loaders_cache_names_is_found_anywhere() {
    let machine = Machine::new();
    machine.library("/opt/site/nccl/lib/libnccl.so.2.28.9");
    machine.link("/opt/site/nccl/lib/libnccl.so.2", "libnccl.so.2.28.9");
    machine.library("/usr/lib/x86_64-linux-gnu/libcuda.so.1");
    // As glibc's ldconfig writes it: header, entries of 24 bytes, strings.
    let strings = b"libnccl.so.2\0/opt/site/nccl/lib/libnccl.so.2\0/gone/lib/libnccl.so.2\0";
    let mut cache = b"glibc-ld.so.cache1.1".to_vec();
    let word = |number: u32| number.to_le_bytes();
    [2, strings.len() as u32, 0, 0, 0, 0, 0].iter().for_each(|number| cache.extend(word(*number)));
    let base = 48 + 2 * 24;
    for value in [base + 13 + 32, base + 13] {
        [0x303, base, value, 0, 0, 0].iter().for_each(|number| cache.extend(word(*number)));
    }
    cache.extend(strings);
    fs::write(machine.at("/etc/ld.so.cache"), &cache).unwrap();
    let libraries = machine.find(None, &[]);
    assert_eq!(libraries.nccl.unwrap(), found("/opt/site/nccl/lib/libnccl.so.2", "2.28.9", Rule::Loader));
    assert_eq!(libraries.driver.unwrap(), found("/usr/lib/x86_64-linux-gnu/libcuda.so.1", "1", Rule::Loader));
    // Damaged in every way it is no more than unknown.
    for length in 0..cache.len() {
        fs::write(machine.at("/etc/ld.so.cache"), &cache[..length]).unwrap();
        let _ = machine.find(None, &[]);
    }
    for at in 20..cache.len() {
        let mut damaged = cache.clone();
        damaged[at] = 0xff;
        fs::write(machine.at("/etc/ld.so.cache"), &damaged).unwrap();
        let _ = machine.find(None, &[]);
    }
}

/// This machine's own, which a real ldconfig wrote.
#[test]
fn a_real_cache_is_read_as_ldconfig_prints_it() {
    let Ok(said) = std::process::Command::new("/sbin/ldconfig").arg("-p").output() else {
        println!("SKIPPED: no ldconfig here");
        return;
    };
    let text = String::from_utf8_lossy(&said.stdout).into_owned();
    let Some(path) =
        text.lines().find_map(|line| line.trim().strip_prefix("libc.so.6 (libc6,x86-64")?.split_once("=> "))
    else {
        println!("SKIPPED: ldconfig -p does not name libc.so.6 here");
        return;
    };
    // The cache of a tree that has the same: NCCL's name in place of libc's, of equal length.
    let machine = Machine::new();
    let mut cache = fs::read("/etc/ld.so.cache").unwrap();
    let old = path.1.as_bytes();
    let new = [&b"/lib/"[..], "x".repeat(old.len() - 18).as_bytes(), b"/libnccl.so.2"].concat();
    assert_eq!(new.len(), old.len());
    for at in 0..cache.len() - old.len() {
        if &cache[at..at + old.len()] == old {
            cache[at..at + old.len()].copy_from_slice(&new);
        }
    }
    let new = String::from_utf8(new).unwrap();
    fs::write(machine.at("/etc/ld.so.cache"), &cache).unwrap();
    machine.library(&new);
    assert_eq!(machine.find(None, &[]).nccl.unwrap(), found(&new, "2", Rule::Loader));
}

#[test]
fn nvrtc_is_taken_with_its_builtins_and_the_newest_of_a_directory() {
    let machine = Machine::new();
    machine.library("/named/libnvrtc.so.13");
    machine.library("/named/libnvrtc-builtins.so.12.8");
    let alone = machine.find(Some("/named"), &[]).nvrtc.unwrap_err();
    assert!(
        alone.to_string().contains("/named/libnvrtc.so.13 is alone: libnvrtc-builtins.so of its version"),
        "{alone}"
    );
    machine.nvrtc("/named", "9.2");
    machine.nvrtc("/named", "12.8.93");
    machine.library("/named/libnvrtc.so");
    machine.library("/named/libnvrtc.alt.so.14");
    machine.library("/named/libnvrtc_static.so.15");
    let libraries = machine.find(Some("/named"), &[]);
    assert_eq!(libraries.nvrtc.unwrap(), found("/named/libnvrtc.so.12.8.93", "12.8.93", Rule::Configured));
    let builtins = libraries.nvrtc_builtins.unwrap();
    assert!(builtins.to_str().unwrap().starts_with("/named/libnvrtc-builtins.so.12.8"), "{builtins:?}");
}

#[test]
fn a_missing_one_is_one_line_that_names_it_the_places_and_the_cure() {
    let machine = Machine::new();
    machine.library("/usr/local/cuda-12.8/lib64/other.so");
    for directory in ["a", "b", "c", "d", "e", "f"] {
        fs::create_dir_all(machine.at(&format!("/{directory}/x"))).unwrap();
    }
    let libraries = machine.find(Some("/named"), &[("LD_LIBRARY_PATH", "/a:/b:/c:/d:/e:/f")]);
    let line = libraries.cublaslt.unwrap_err().to_string();
    assert_eq!(
        line,
        "libcublasLt.so is not found in the configured directory (/named), LD_LIBRARY_PATH (/a, /b, /c, /d and 2 more), \
         /usr/local/cuda*/lib64 (/usr/local/cuda-12.8/lib64), the loader's cache and directories (none), \
         site-packages/nvidia/*/lib (none); install it (pip install nvidia-cublas, or the CUDA toolkit), or name its \
         directory in train.cuda_libraries"
    );
    // A toolkit has no driver.
    let driver = libraries.driver.unwrap_err().to_string();
    assert!(driver.starts_with("libcuda.so.1 is not found in ") && !driver.contains("/usr/local/cuda"), "{driver}");
    assert!(libraries.nccl.unwrap_err().to_string().starts_with("libnccl.so.2 is not found in "));
}

#[test]
fn what_cannot_be_loaded_is_passed_over_and_told() {
    let machine = Machine::new();
    machine.library("/stubs/libcuda.so.1");
    machine.link("/dead/libcuda.so.1", "libcuda.so.535.1");
    fs::write(machine.at("/text/libcuda.so.1"), "INPUT(libcuda.so.535)\n a linker's script").unwrap();
    fs::write(machine.at("/arm/libcuda.so.1"), header(OTHER)).unwrap();
    fs::create_dir_all(machine.at("/folder/libcuda.so.1/x")).unwrap();
    let path = "/stubs:/dead:/text:/arm:/folder";
    let line = machine.find(None, &[("LD_LIBRARY_PATH", path)]).driver.unwrap_err();
    assert_eq!(
        line.skipped,
        [
            "/stubs/libcuda.so.1 is a stub to link with, and no library",
            "/dead/libcuda.so.1 is a link to nothing",
            "/text/libcuda.so.1 is no ELF file",
            "/arm/libcuda.so.1 is for another processor",
            "/folder/libcuda.so.1 is no file",
        ]
    );
    machine.library("/good/libcuda.so.535.104.05");
    machine.link("/good/libcuda.so.1", "libcuda.so.535.104.05");
    let driver = machine.find(None, &[("LD_LIBRARY_PATH", &format!("{path}:/good"))]).driver.unwrap();
    assert_eq!(driver, found("/good/libcuda.so.1", "535.104.05", Rule::LibraryPath));
}

#[test]
fn a_path_that_grew_in_a_loop_is_not_looked_through_for_ever() {
    let machine = Machine::new();
    let path = (0..20_000).map(|index| format!("/p{index}")).collect::<Vec<_>>().join(":");
    machine.library("/p19999/libnccl.so.2");
    machine.library("/p100/libcublasLt.so.13");
    let libraries = machine.find(None, &[("LD_LIBRARY_PATH", &path)]);
    assert!(libraries.nccl.is_err() && libraries.cublaslt.is_ok());
}

#[test]
fn a_link_to_a_stub_is_no_driver() {
    let machine = Machine::new();
    machine.library("/usr/local/cuda/lib64/stubs/libcuda.so");
    machine.library("/usr/local/cuda/lib64/stubs/libcuda.so.1");
    machine.link("/usr/lib64/libcuda.so.1", "../local/cuda/lib64/stubs/libcuda.so");
    machine.link("/opt/lib", "../usr/local/cuda/lib64/stubs");
    let missing = machine.find(None, &[("LD_LIBRARY_PATH", "/opt/lib")]).driver.unwrap_err();
    for file in ["/opt/lib/libcuda.so.1", "/usr/lib64/libcuda.so.1"] {
        let told = format!("{file} is a stub to link with, and no library");
        assert!(missing.skipped.contains(&told), "{missing}");
    }
}

#[test]
fn builtins_are_of_nvrtcs_minor_version_and_can_be_loaded() {
    let machine = Machine::new();
    machine.nvrtc("/two", "12.4.127");
    machine.link("/two/libnvrtc.so.12", "libnvrtc.so.12.4.127");
    machine.library("/two/libnvrtc-builtins.so.12.6.77");
    let libraries = machine.find(Some("/two"), &[]);
    assert_eq!(libraries.nvrtc_builtins, Some("/two/libnvrtc-builtins.so.12.4.127".into()));

    machine.library("/broken/libnvrtc.so.12");
    machine.link("/broken/libnvrtc-builtins.so.12.4", "gone");
    machine.nvrtc("/whole", "12");
    let libraries = machine.find(Some("/broken"), &[("LD_LIBRARY_PATH", "/whole")]);
    assert_eq!(libraries.nvrtc, Ok(found("/whole/libnvrtc.so.12", "12", Rule::LibraryPath)));
}

#[test]
fn a_toolkit_without_lib64_has_its_targets_directory() {
    let machine = Machine::new();
    let target = if cfg!(target_arch = "aarch64") { "sbsa-linux" } else { "x86_64-linux" };
    let directory = format!("/usr/local/cuda-13.0/targets/{target}/lib");
    machine.nvrtc(&directory, "13");
    let libraries = machine.find(None, &[]);
    assert_eq!(libraries.nvrtc, Ok(found(&format!("{directory}/libnvrtc.so.13"), "13", Rule::Toolkit)));
}
