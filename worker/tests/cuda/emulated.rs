//! A device that runs the kernels' own text on the processor: compiled by g++ with host.h,
//! each thread of a block a coroutine. What it shows is what is computed, and where is read
//! and written; not how fast, nor what only a GPU's compiler does to it.

use std::alloc::{Layout, alloc, dealloc};
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::rc::Rc;
use std::sync::OnceLock;

use palingenesis_worker::dynamic::Library;
use palingenesis_worker::engine::cuda::device::{Arguments, Device, Gemm};
use palingenesis_worker::engine::cuda::kernels;
use palingenesis_worker::engine::{Cpu, Engine, EngineError, Precision, Result};

type Launch = unsafe extern "C" fn(*const c_char, c_uint, c_uint, c_uint, c_uint, c_uint, *mut *mut c_void) -> c_int;
type Why = unsafe extern "C" fn() -> *const c_char;

/// The kernels as g++ compiled them.
struct Compiled {
    launch: Launch,
    why: Why,
}

/// Once for all tests of a process; None, and a line, where there is no g++.
fn compiled() -> Option<&'static Compiled> {
    static COMPILED: OnceLock<Option<Compiled>> = OnceLock::new();
    COMPILED.get_or_init(compile).as_ref()
}

/// Options of g++. A vector at an address that is no multiple of its size ends a GPU's
/// program, and here the test's, with the kernel's line.
const OPTIONS: &[&str] = &[
    "-std=c++17",
    "-O2",
    "-ffp-contract=off",
    "-fsanitize=alignment,bounds,shift,signed-integer-overflow",
    "-fno-sanitize-recover=all",
    "-shared",
    "-fPIC",
    "-w",
];

fn compile() -> Option<Compiled> {
    let library = Library::open(&library()?).unwrap();
    // SAFETY: the functions of host.h have these types.
    unsafe {
        Some(Compiled {
            launch: library.symbol::<Launch>("emulated_launch").unwrap(),
            why: library.symbol::<Why>("emulated_error").unwrap(),
        })
    }
}

/// The file with the kernels, made once for each text. None, and a line, where there is no g++.
pub fn library() -> Option<PathBuf> {
    let host = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cuda/host.h");
    let mut text = kernels::source();
    for name in kernels::names() {
        text.push_str(&format!("REGISTER({name})\n"));
    }
    let all = [&fs::read(host).unwrap(), text.as_bytes(), OPTIONS.concat().as_bytes()].concat();
    let hash = hmac_sha256::Hash::hash(&all).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let library = folder.join(format!("kernels-{}.so", &hash[..16]));
    if !library.exists() {
        let own = folder.join(format!("kernels-{}-{}", &hash[..16], std::process::id()));
        let (source, made) = (own.with_extension("cpp"), own.with_extension("new"));
        fs::write(&source, text).unwrap();
        let mut command = Command::new("g++");
        match command.args(OPTIONS).args(["-include", host]).arg(&source).arg("-o").arg(&made).output() {
            Err(error) => {
                println!("SKIPPED: g++ is not here to compile the kernels for the processor: {error}");
                return None;
            }
            Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr)),
        }
        fs::rename(&made, &library).unwrap();
        let _ = fs::remove_file(source);
    }
    Some(library)
}

/// Bytes before and after each piece of memory that nobody is to touch.
const GUARD: usize = 256;
const UNTOUCHED: u8 = 0xa5;

/// A piece of memory between guards.
#[derive(Debug)]
pub struct Memory {
    start: *mut u8,
    bytes: usize,
    living: Rc<RefCell<Vec<(usize, usize)>>>,
}

impl Memory {
    fn layout(bytes: usize) -> Layout {
        Layout::from_size_align(bytes + 2 * GUARD, 256).unwrap()
    }

    fn check(start: *const u8, bytes: usize) {
        // SAFETY: as it was allocated.
        let (before, after) = unsafe {
            (std::slice::from_raw_parts(start, GUARD), std::slice::from_raw_parts(start.add(GUARD + bytes), GUARD))
        };
        assert!(before.iter().chain(after).all(|byte| *byte == UNTOUCHED), "a kernel wrote beside its {bytes} bytes");
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            Memory::check(self.start, self.bytes);
        }
        self.living.borrow_mut().retain(|(start, _)| *start != self.start as usize);
        // SAFETY: as it was allocated.
        unsafe { dealloc(self.start, Memory::layout(self.bytes)) }
    }
}

/// The device. All is done at once.
pub struct Emulated {
    compiled: &'static Compiled,
    living: Rc<RefCell<Vec<(usize, usize)>>>,
    products: Cpu,
}

impl Emulated {
    /// None, and a line, where there is no g++.
    pub fn new() -> Option<Emulated> {
        Some(Emulated { compiled: compiled()?, living: Rc::default(), products: Cpu::new(Some(1)) })
    }

    /// That the bytes lie in one piece of memory.
    fn within(&self, address: u64, bytes: usize) {
        let at = address as usize;
        let living = self.living.borrow();
        let inside = |(start, len): &(usize, usize)| start + GUARD <= at && at + bytes <= start + GUARD + len;
        assert!(bytes == 0 || living.iter().any(inside), "{bytes} bytes at {address:#x} are not all the device's");
    }

    fn floats(&self, address: u64, len: usize, precision: Precision) -> Vec<f32> {
        self.within(address, len * precision.bytes());
        let at = address as usize;
        match precision {
            // SAFETY: within the device's memory.
            Precision::F32 => unsafe { std::slice::from_raw_parts(at as *const f32, len) }.to_vec(),
            Precision::Bf16 => {
                // SAFETY: as above.
                let short = unsafe { std::slice::from_raw_parts(at as *const half::bf16, len) };
                short.iter().map(|number| number.to_f32()).collect()
            }
        }
    }
}

impl Device for Emulated {
    type Memory = Memory;

    fn allocate(&self, bytes: usize) -> Result<Memory> {
        if bytes > 1 << 40 {
            return Err(EngineError::Wrong(format!("no memory for {bytes} bytes")));
        }
        // SAFETY: a size that is not 0; all of it is written before it is read.
        let start = unsafe {
            let start = alloc(Memory::layout(bytes));
            assert!(!start.is_null());
            start.write_bytes(UNTOUCHED, bytes + 2 * GUARD);
            start.add(GUARD).write_bytes(0, bytes);
            start
        };
        self.living.borrow_mut().push((start as usize, bytes));
        Ok(Memory { start, bytes, living: Rc::clone(&self.living) })
    }

    fn address(memory: &Memory) -> u64 {
        (memory.start as usize + GUARD) as u64
    }

    fn write(&self, to: u64, from: &[u8]) -> Result<()> {
        self.within(to, from.len());
        // SAFETY: within the device's memory.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to as usize as *mut u8, from.len()) };
        Ok(())
    }

    fn read(&self, from: u64, to: &mut [u8]) -> Result<()> {
        self.within(from, to.len());
        // SAFETY: within the device's memory.
        unsafe { std::ptr::copy_nonoverlapping(from as usize as *const u8, to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    fn set(&self, to: u64, bytes: usize, value: u8) -> Result<()> {
        self.within(to, bytes);
        // SAFETY: within the device's memory.
        unsafe { std::ptr::write_bytes(to as usize as *mut u8, value, bytes) };
        Ok(())
    }

    fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        self.within(to, bytes);
        self.within(from, bytes);
        assert!(to + bytes as u64 <= from || from + bytes as u64 <= to || bytes == 0, "a copy onto itself");
        // SAFETY: within the device's memory, and apart.
        unsafe { std::ptr::copy_nonoverlapping(from as usize as *const u8, to as usize as *mut u8, bytes) };
        Ok(())
    }

    fn launch(
        &self,
        kernel: &'static str,
        grid: [u32; 3],
        block: u32,
        shared: u32,
        arguments: &Arguments,
    ) -> Result<()> {
        assert!(kernels::names().contains(&kernel), "{kernel} is not told to the driver");
        assert!(grid.iter().all(|count| *count > 0) && grid[1] < 65_536 && grid[2] < 65_536 && block <= 1024);
        // What an A100 has, less what the system takes.
        assert!(shared <= 163 << 10, "{kernel} wants {shared} bytes of shared memory");
        let name = CString::new(kernel).unwrap();
        let mut addresses = arguments.addresses();
        // SAFETY: the kernel's arguments, in order; it reads and writes the device's memory.
        let code = unsafe {
            let [x, y, z] = grid;
            (self.compiled.launch)(name.as_ptr(), x, y, z, block, shared, addresses.as_mut_ptr())
        };
        // SAFETY: a string of the library's.
        let why = || unsafe { CStr::from_ptr((self.compiled.why)()) }.to_string_lossy().into_owned();
        assert!(code == 0, "{kernel}: {}", why());
        for (start, bytes) in self.living.borrow().iter() {
            Memory::check(*start as *const u8, *bytes);
        }
        Ok(())
    }

    fn gemm(&self, gemm: &Gemm) -> Result<()> {
        let how = gemm.how;
        let (a, b) =
            (self.floats(gemm.a, how.m * how.k, gemm.precision), self.floats(gemm.b, how.k * how.n, gemm.precision));
        let mut c = vec![0.0; how.m * how.n];
        if how.accumulate {
            c = self.floats(gemm.c, how.m * how.n, gemm.c_precision);
        }
        self.products.matmul(&mut c, &a, &b, how)?;
        self.within(gemm.c, c.len() * gemm.c_precision.bytes());
        match gemm.c_precision {
            Precision::F32 => self.write(gemm.c, zerocopy::IntoBytes::as_bytes(&c[..])),
            Precision::Bf16 => {
                let short: Vec<u16> = c.iter().map(|number| half::bf16::from_f32(*number).to_bits()).collect();
                self.write(gemm.c, zerocopy::IntoBytes::as_bytes(&short[..]))
            }
        }
    }

    fn finish(&self) -> Result<()> {
        Ok(())
    }

    fn memory_in_use(&self) -> Option<u64> {
        Some(self.living.borrow().iter().map(|(_, bytes)| *bytes as u64).sum())
    }

    fn architecture(&self) -> u32 {
        90
    }

    fn processors(&self) -> u32 {
        3
    }
}
