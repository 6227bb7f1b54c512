//! Real NVRTC, without a GPU: all kernels compile for all architectures that matter, and
//! what was compiled is kept and trusted as far as it may be. Skipped where
//! scripts/cuda-libraries has not brought NVRTC.

#[path = "cuda/libraries.rs"]
mod libraries;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use palingenesis_worker::dynamic::{Library, LibraryError};
use palingenesis_worker::engine::cuda::kernels;
use palingenesis_worker::engine::cuda::nvrtc::{Cache, CompileError, Compiler, Target};

/// Two kernels, one of them with shared memory.
const SOURCE: &str = r#"
extern "C" __global__ void twice(float *x, long long n) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) x[i] *= 2.0f;
}
extern "C" __global__ void turn(float *x) {
    extern __shared__ float s[];
    s[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = s[blockDim.x - 1 - threadIdx.x];
}
"#;

fn compiler() -> Option<Compiler> {
    let builtins = libraries::find("libnvrtc-builtins.so.")?;
    Library::open(&builtins).unwrap();
    Some(Compiler::new(&Library::open(&libraries::find("libnvrtc.so.")?).unwrap()).unwrap())
}

/// Names of the sections of a 64-bit little-endian ELF file, from its section headers.
fn sections(elf: &[u8]) -> Vec<String> {
    let number = |at: usize, bytes: usize| {
        elf[at..at + bytes].iter().rev().fold(0_usize, |sum, byte| sum << 8 | usize::from(*byte))
    };
    assert_eq!(&elf[..6], b"\x7fELF\x02\x01");
    // e_shoff, e_shentsize, e_shnum, e_shstrndx; sh_name, sh_offset.
    let (start, size, count, names) = (number(40, 8), number(58, 2), number(60, 2), number(62, 2));
    let strings = number(start + names * size + 24, 8);
    (0..count)
        .map(|section| {
            let name = &elf[strings + number(start + section * size, 4)..];
            String::from_utf8(name.iter().copied().take_while(|byte| *byte != 0).collect()).unwrap()
        })
        .collect()
}

#[test]
fn every_kernel_is_in_the_code_for_every_architecture() {
    let Some(compiler) = compiler() else { return };
    let (source, names) = (kernels::source(), kernels::names());
    for architecture in [80, 90, 100] {
        assert_eq!(compiler.target(architecture), Ok(Target::Cubin(architecture)));
        for (source, names) in [(SOURCE, &["twice", "turn"][..]), (source.as_str(), &names[..])] {
            if names.is_empty() {
                continue;
            }
            let target = Target::Cubin(architecture);
            let image = compiler.compile(source, target, &["--ptxas-options=-v"], &Cache::none());
            let image = image.unwrap_or_else(|error| panic!("{error}"));
            let sections = sections(&image.bytes);
            for name in names {
                assert!(sections.contains(&format!(".text.{name}")), "{name} is missing for {architecture}");
            }
            let code = sections.iter().filter(|name| name.starts_with(".text.")).count();
            assert_eq!(code, names.len(), "kernels that no name is for: {sections:?}");
            println!("sm_{architecture}: {} kernels, {} bytes", names.len(), image.bytes.len());
            assert!(image.log.contains("Compiling entry function"), "ptxas says nothing: {}", image.log);
            spills(&image.log).into_iter().for_each(|line| println!("sm_{architecture}: {line}"));
        }
    }
}

/// "NAME spills 16 bytes", of what ptxas says of each function.
fn spills(log: &str) -> Vec<String> {
    let mut name = "?";
    let mut found = Vec::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            name = rest.split('\'').next().unwrap_or("?");
        } else if let Some((before, _)) = line.split_once(" bytes spill stores") {
            let bytes = before.rsplit(' ').next().unwrap_or("?");
            if bytes != "0" {
                found.push(format!("{name} spills {bytes} bytes"));
            }
        }
    }
    found
}

#[test]
fn what_ptxas_says_of_spilling_is_understood() {
    let log = "ptxas info    : Compiling entry function 'a' for 'sm_80'\n\
               ptxas info    : Function properties for a\n    \
               8 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads\n\
               ptxas info    : Compiling entry function 'b' for 'sm_80'\n    \
               0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n";
    assert_eq!(spills(log), ["a spills 16 bytes"]);
}

#[test]
fn a_gpu_newer_than_the_compiler_gets_what_runs_on_it() {
    let known = [75, 80, 86, 89, 90, 100, 103, 110, 120, 121];
    assert_eq!(Target::best(&known, 90), Some(Target::Cubin(90)));
    // CUDA C++ Programming Guide, binary compatibility: from one minor version to the next.
    assert_eq!(Target::best(&known, 87), Some(Target::Cubin(86)));
    assert_eq!(Target::best(&known, 130), Some(Target::Ptx(121)));
    assert_eq!(Target::best(&known, 70), None);

    let Some(compiler) = compiler() else { return };
    let newest = *compiler.known().iter().max().unwrap();
    assert_eq!(compiler.target(newest + 50), Ok(Target::Ptx(newest)));
    let image = compiler.compile(SOURCE, Target::Ptx(newest), &[], &Cache::none()).unwrap();
    let text = String::from_utf8(image.bytes).unwrap();
    assert!(text.ends_with('\0') && text.contains(&format!(".target sm_{newest}")), "{text}");
    assert!(text.contains(".entry twice") && text.contains(".entry turn"), "{text}");
    let error = compiler.target(50).unwrap_err().to_string();
    assert!(error.contains("cannot compile for a GPU of compute capability 5.0; install an older one"), "{error}");
}

#[test]
fn a_mistake_in_a_kernel_is_told_with_its_line() {
    let Some(compiler) = compiler() else { return };
    let wrong = "extern \"C\" __global__ void f(float *x) {\n    x[0] = unknown;\n}\n";
    let error = compiler.compile(wrong, Target::Cubin(80), &[], &Cache::none()).unwrap_err();
    assert!(matches!(&error, CompileError::Failed { why, .. } if why == "NVRTC_ERROR_COMPILATION"), "{error}");
    let text = error.to_string();
    assert!(text.contains("kernels.cu(2): error: identifier \"unknown\" is undefined"), "{text}");
    assert!(text.contains("--gpu-architecture=sm_80 --std=c++17 -default-device"), "{text}");
}

/// The files in a directory, by name.
fn files(directory: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

#[test]
fn compiled_kernels_are_kept_and_taken_again() {
    let Some(compiler) = compiler() else { return };
    let place = tempfile::tempdir().unwrap();
    let directory = place.path().join("above/kernels");
    let cache = Cache::at(&directory);
    let compile = |source: &str, target| compiler.compile(source, target, &[], &cache).unwrap();
    let first = compile(SOURCE, Target::Cubin(90));
    assert!(!first.cached);
    assert_eq!(fs::metadata(&directory).unwrap().mode() & 0o7777, 0o700);
    let [file] = &files(&directory)[..] else { panic!("{:?}", files(&directory)) };
    assert_eq!(fs::metadata(file).unwrap().mode() & 0o7777, 0o600);

    let second = compile(SOURCE, Target::Cubin(90));
    assert!(second.cached);
    assert_eq!(second.bytes, first.bytes);
    // Another text, another architecture and other options are other files.
    assert!(!compile(&format!("{SOURCE} "), Target::Cubin(90)).cached);
    assert!(!compile(SOURCE, Target::Cubin(80)).cached);
    assert!(!compiler.compile(SOURCE, Target::Cubin(90), &["--use_fast_math"], &cache).unwrap().cached);
    assert_eq!(files(&directory).len(), 4);
}

#[test]
fn a_damaged_file_is_replaced() {
    let Some(compiler) = compiler() else { return };
    let place = tempfile::tempdir().unwrap();
    let cache = Cache::at(place.path());
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o700)).unwrap();
    let compile = || compiler.compile(SOURCE, Target::Cubin(90), &[], &cache).unwrap();
    let right = compile();
    let [file] = &files(place.path())[..] else { panic!("{:?}", files(place.path())) };
    let whole = fs::read(file).unwrap();
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 1;
    for damaged in [flipped, whole[..whole.len() - 1].to_vec(), whole[..40].to_vec(), b"other".to_vec(), vec![]] {
        fs::write(file, &damaged).unwrap();
        let again = compile();
        assert!(!again.cached, "{} bytes", damaged.len());
        assert_eq!(again.bytes, right.bytes);
        assert_eq!(fs::read(file).unwrap(), whole);
    }
    assert!(compile().cached);
}

#[test]
fn what_others_may_have_written_is_not_taken() {
    let Some(compiler) = compiler() else { return };
    let place = tempfile::tempdir().unwrap();
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o700)).unwrap();
    let cache = Cache::at(place.path());
    let compile = || compiler.compile(SOURCE, Target::Cubin(90), &[], &cache).unwrap();
    compile();
    let [file] = &files(place.path())[..] else { panic!("{:?}", files(place.path())) };
    let mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();

    mode(file, 0o620);
    assert!(!compile().cached, "a file that the group may write");
    assert!(compile().cached, "it was replaced by one that only we may write");

    mode(place.path(), 0o770);
    assert!(!compile().cached, "a directory that the group may write");
    mode(place.path(), 0o700);

    let aside = place.path().join("aside");
    fs::rename(file, &aside).unwrap();
    std::os::unix::fs::symlink(&aside, file).unwrap();
    assert!(!compile().cached, "a link");
    assert!(compile().cached, "it was replaced by a file");

    if std::os::unix::fs::chown(file, Some(12345), None).is_err() {
        eprintln!("SKIPPED: only root can give a file to another user");
        return;
    }
    assert!(!compile().cached, "another user's file");
    assert_eq!(fs::metadata(file).unwrap().uid(), fs::metadata(place.path()).unwrap().uid());
    std::os::unix::fs::chown(place.path(), Some(12345), None).unwrap();
    assert!(!compile().cached, "another user's directory");
}

#[test]
fn a_cache_that_cannot_be_written_costs_nothing_but_time() {
    let Some(compiler) = compiler() else { return };
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join("file");
    fs::write(&file, "").unwrap();
    // A file where a directory should be; what nobody can make a directory in, nor root.
    for directory in [file.clone(), file.join("below"), PathBuf::from("/proc/self/kernels")] {
        let cache = Cache::at(&directory);
        for _ in 0..2 {
            let image = compiler.compile(SOURCE, Target::Cubin(90), &[], &cache).unwrap();
            assert!(!image.cached && !image.bytes.is_empty());
        }
    }
}

#[test]
fn the_cache_is_where_cuda_keeps_its_own() {
    let of = |variables: &'static [(&str, &str)]| {
        Cache::from_variables(|name| variables.iter().find(|(one, _)| *one == name).map(|(_, value)| value.into()))
    };
    let at = |path: &str| Cache::at(Path::new(path));
    let all = &[("CUDA_CACHE_PATH", "/a"), ("XDG_CACHE_HOME", "/b"), ("HOME", "/c")];
    assert_eq!(of(all), at("/a/palingenesis-worker"));
    assert_eq!(of(&all[1..]), at("/b/palingenesis-worker"));
    assert_eq!(of(&all[2..]), at("/c/.cache/palingenesis-worker"));
    assert_eq!(of(&[("XDG_CACHE_HOME", "relative"), ("HOME", "/c")]), at("/c/.cache/palingenesis-worker"));
    assert_eq!(of(&[("HOME", "")]), Cache::none());
    assert_eq!(of(&[("HOME", "/c"), ("CUDA_CACHE_DISABLE", "1")]), Cache::none());
}

#[test]
fn a_library_that_is_none_is_named() {
    let place = tempfile::tempdir().unwrap();
    let missing = place.path().join("libnvrtc.so.13");
    let error = Library::open(&missing).unwrap_err().to_string();
    let path = missing.display();
    assert_eq!(error, format!("{path} cannot be loaded: cannot open shared object file: No such file or directory"));
    fs::write(&missing, "no library").unwrap();
    let error = Library::open(&missing).unwrap_err().to_string();
    assert_eq!(error, format!("{path} cannot be loaded: file too short"));
    // The C library is there for certain, and is not NVRTC.
    let error = Compiler::new(&Library::open(Path::new("libc.so.6")).unwrap()).unwrap_err();
    assert!(matches!(&error, LibraryError::Symbol { symbol, .. } if symbol == "nvrtcVersion"), "{error}");
    assert!(error.to_string().starts_with("libc.so.6 has no function nvrtcVersion: "), "{error}");
}
