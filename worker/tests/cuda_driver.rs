//! The GPU behind the driver's interface, against a stand-in for libcuda and cublasLt that
//! writes down what it is asked (cuda/driver_double.c), and real cublasLt as far as it goes
//! without a GPU.

#[path = "cuda/libraries.rs"]
mod libraries;

use std::ffi::{CStr, CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use palingenesis_worker::dynamic::Library;
use palingenesis_worker::engine::cuda::blas::Blas;
use palingenesis_worker::engine::cuda::device::{Arguments, Device, Gemm};
use palingenesis_worker::engine::cuda::driver::{Context, Gpu, Stop, Stream, is_hardware};
use palingenesis_worker::engine::cuda::nvrtc::{Cache, Target};
use palingenesis_worker::engine::cuda::start::{Places, StartError, fits, start_with};
use palingenesis_worker::engine::cuda::sys;
use palingenesis_worker::engine::{Cpu, Engine, EngineError, Matmul, Precision};

/// As the stand-in's image lists them.
const IMAGE: &[u8] = b"plain_3\nlarge_1\n\0";
const NAMES: &[&str] = &["plain_3", "large_1"];
/// What one piece of pinned memory holds: writes and reads of more are in several.
const PIECE: usize = 4 << 20;

/// One stand-in of its own: each copy of the file is loaded as another library.
struct Double {
    library: Library,
    path: PathBuf,
    _place: tempfile::TempDir,
}

impl Double {
    fn new() -> Double {
        static BUILT: OnceLock<tempfile::TempDir> = OnceLock::new();
        let built = BUILT.get_or_init(|| {
            let place = tempfile::tempdir().unwrap();
            let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cuda/driver_double.c");
            let output = Command::new("cc")
                .args(["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden"])
                .args(["-Wl,-Bsymbolic", "-o"])
                .args([place.path().join("double.so").as_path(), Path::new(source)])
                .output()
                .unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            place
        });
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("libcuda.so.1");
        std::fs::copy(built.path().join("double.so"), &path).unwrap();
        Double { library: Library::open(&path).unwrap(), path, _place: place }
    }

    fn gpu(&self) -> Gpu {
        self.gpu_with(Stop::new())
    }

    fn gpu_with(&self, stop: Stop) -> Gpu {
        let gpu = self.try_gpu(stop).unwrap();
        self.forget();
        gpu
    }

    fn try_gpu(&self, stop: Stop) -> Result<Gpu, StartError> {
        Gpu::new(Context::open(&self.library, 0, stop)?, IMAGE, NAMES, &self.library)
    }

    /// Lets a function fail from its call after the next `after`.
    fn fail(&self, function: &str, code: c_int, after: c_int) {
        let function = CString::new(function).unwrap();
        // SAFETY: the stand-in's signature.
        unsafe {
            let fail: unsafe extern "C" fn(*const c_char, c_int, c_int) = self.library.symbol("double_fail").unwrap();
            fail(function.as_ptr(), code, after);
        }
    }

    fn set(&self, what: &str, value: c_int) {
        // SAFETY: as above, of all that take one int.
        unsafe { self.library.symbol::<unsafe extern "C" fn(c_int)>(what).unwrap()(value) }
    }

    fn others(&self, bytes: u64) {
        // SAFETY: as above.
        unsafe { self.library.symbol::<unsafe extern "C" fn(u64)>("double_others").unwrap()(bytes) }
    }

    fn forget(&self) {
        // SAFETY: as above.
        unsafe { self.library.symbol::<unsafe extern "C" fn()>("double_forget").unwrap()() }
    }

    /// What was asked of it since it forgot, a line each.
    fn log(&self) -> Vec<String> {
        // SAFETY: as above; the text is NUL-terminated.
        let text = unsafe {
            let log: unsafe extern "C" fn() -> *const c_char = self.library.symbol("double_log").unwrap();
            CStr::from_ptr(log())
        };
        text.to_str().unwrap().lines().map(str::to_string).collect()
    }

    /// Allocations on the device, of pinned memory, events, streams that are not given back.
    fn live(&self) -> [c_int; 4] {
        // SAFETY: as above.
        let live: unsafe extern "C" fn(c_int) -> c_int = unsafe { self.library.symbol("double_live").unwrap() };
        // SAFETY: as above.
        [0, 1, 2, 3].map(|what| unsafe { live(what) })
    }
}

/// Bytes that differ from place to place.
fn pattern(len: usize, salt: usize) -> Vec<u8> {
    (0..len).map(|at| ((at ^ at >> 8 ^ at >> 16).wrapping_mul(31) + salt) as u8).collect()
}

fn failed<T: std::fmt::Debug>(result: Result<T, EngineError>) -> String {
    match result {
        Err(EngineError::Device(text)) => text,
        other => panic!("no error of the device: {other:?}"),
    }
}

#[test]
fn the_gpu_is_what_the_driver_says() {
    let double = Double::new();
    let gpu = double.gpu();
    let identity = gpu.context().identity();
    assert_eq!(identity.to_string(), "GPU 0 (Double 0, GPU-00112233-4455-6677-8899-aabbccddeeff, 0000:a7:00.0)");
    assert_eq!((gpu.architecture(), gpu.processors()), (90, 132));
    assert_eq!((identity.memory, identity.driver), (16 << 30, 13000));
    assert!(matches!(
        Context::open(&double.library, 1, Stop::new()),
        Err(StartError::NoSuchGpu { ordinal: 1, count: 1, .. })
    ));
}

#[test]
fn memory_is_zero_and_given_back() {
    let double = Double::new();
    let gpu = double.gpu();
    let before = double.live();
    let memory = gpu.allocate(1000).unwrap();
    assert_eq!(Gpu::address(&memory) % 256, 0);
    let mut bytes = vec![1; 1000];
    gpu.read(Gpu::address(&memory), &mut bytes).unwrap();
    assert_eq!(bytes, vec![0; 1000]);
    assert_eq!(gpu.usage().unwrap().own, (64 << 20) + 1024);
    drop(memory);
    assert_eq!(double.live(), before);
    let usage = gpu.usage().unwrap();
    assert_eq!((usage.own, usage.peak, usage.total), (64 << 20, (64 << 20) + 1024, 16 << 30));
    drop(gpu);
    assert_eq!(double.live(), [0; 4]);
}

#[test]
fn all_that_is_written_is_read_back_however_late_the_gpu_is() {
    let double = Double::new();
    for lazy in [0, 1] {
        double.set("double_lazy", lazy);
        let gpu = double.gpu();
        // More than the ring holds, and small ones between, of odd lengths.
        let sizes = [1, 255, 257, 5 * PIECE + 13, 0, 77, PIECE, 2 * PIECE - 1, 3, 6 * PIECE];
        let memory: Vec<_> = sizes.iter().map(|size| gpu.allocate(*size).unwrap()).collect();
        for (at, size) in sizes.iter().enumerate() {
            let mut from = pattern(*size, at);
            gpu.write(Gpu::address(&memory[at]), &from).unwrap();
            // The caller's memory is used again at once.
            from.fill(0xEE);
        }
        for (at, size) in sizes.iter().enumerate() {
            let mut to = vec![0; *size];
            gpu.read(Gpu::address(&memory[at]), &mut to).unwrap();
            assert!(to == pattern(*size, at), "{size} bytes, lazy {lazy}");
        }
        gpu.finish().unwrap();
    }
}

#[test]
fn small_writes_share_pinned_memory_and_wait_for_nothing() {
    let double = Double::new();
    let gpu = double.gpu();
    let memory = gpu.allocate(4096).unwrap();
    // A GPU that does nothing more: as long as the ring has room, nobody waits.
    double.set("double_stuck", 1);
    for at in 0..(3 * PIECE / 256) as u64 {
        gpu.write(Gpu::address(&memory) + at % 16 * 256, &[1; 256]).unwrap();
    }
    gpu.context().stop().set();
}

#[test]
fn bytes_are_set_and_copied_on_the_device() {
    let double = Double::new();
    let gpu = double.gpu();
    let (one, other) = (gpu.allocate(512).unwrap(), gpu.allocate(512).unwrap());
    gpu.set(Gpu::address(&one) + 10, 100, 7).unwrap();
    gpu.copy(Gpu::address(&other) + 20, Gpu::address(&one) + 5, 50).unwrap();
    gpu.set(0, 0, 1).unwrap();
    gpu.copy(0, 0, 0).unwrap();
    let mut to = [0; 100];
    gpu.read(Gpu::address(&other), &mut to).unwrap();
    let right: Vec<u8> = (0..100).map(|at| if (25..70).contains(&at) { 7 } else { 0 }).collect();
    assert_eq!(to[..], right);
}

#[test]
fn a_kernel_gets_its_arguments_and_asks_for_much_shared_memory_once() {
    let double = Double::new();
    let gpu = double.gpu();
    let arguments = Arguments::new().pointer(0xABCD_0000_1234).int(-2).float(1.5);
    gpu.launch("plain_3", [7, 2, 1], 256, 44 << 10, &arguments).unwrap();
    // With what a kernel has of its own, that is more than 48 KiB.
    gpu.launch("plain_3", [1, 1, 1], 256, 48 << 10, &arguments).unwrap();
    let long = Arguments::new().long(-1);
    for shared in [60_000, 50_000, 60_000, 100_000] {
        gpu.launch("large_1", [1, 1, 1], 64, shared, &long).unwrap();
    }
    gpu.launch("large_1", [0, 1, 1], 64, 0, &long).unwrap();
    let all = "ffffffffffffffff";
    assert_eq!(
        double.log(),
        [
            "launch plain_3 7x2x1 256x1x1 45056: abcd00001234 fffffffe 3fc00000".to_string(),
            "attribute plain_3 8 49152".into(),
            "launch plain_3 1x1x1 256x1x1 49152: abcd00001234 fffffffe 3fc00000".into(),
            "attribute large_1 8 60000".into(),
            format!("launch large_1 1x1x1 64x1x1 60000: {all}"),
            format!("launch large_1 1x1x1 64x1x1 50000: {all}"),
            format!("launch large_1 1x1x1 64x1x1 60000: {all}"),
            "attribute large_1 8 100000".into(),
            format!("launch large_1 1x1x1 64x1x1 100000: {all}"),
        ]
    );
}

#[test]
fn a_kernel_that_the_image_lacks_is_named() {
    let double = Double::new();
    let context = Context::open(&double.library, 0, Stop::new()).unwrap();
    let error = Gpu::new(context, IMAGE, &["plain_3", "absent_0"], &double.library).unwrap_err();
    assert!(
        error.to_string().contains("looking for the kernel absent_0 failed: CUDA_ERROR_NOT_FOUND (500)"),
        "{error}"
    );
    assert!(!error.may_pass());
}

/// Numbers that bf16 holds exactly, and whose products and sums f32 does.
fn numbers(len: usize, salt: usize) -> Vec<f32> {
    (0..len).map(|at| ((at * 7 + salt * 3) % 17) as f32 * 0.25 - 2.0).collect()
}

fn to_bytes(numbers: &[f32], precision: Precision) -> Vec<u8> {
    match precision {
        Precision::F32 => numbers.iter().flat_map(|number| number.to_le_bytes()).collect(),
        Precision::Bf16 => {
            numbers.iter().flat_map(|number| half::bf16::from_f32(*number).to_bits().to_le_bytes()).collect()
        }
    }
}

fn from_bytes(bytes: &[u8], precision: Precision) -> Vec<f32> {
    match precision {
        Precision::F32 => bytes.chunks(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect(),
        Precision::Bf16 => bytes
            .chunks(2)
            .map(|two| half::bf16::from_bits(u16::from_le_bytes(two.try_into().unwrap())).to_f32())
            .collect(),
    }
}

/// The same product by the processor's engine.
fn by_cpu(how: Matmul, a: &[f32], b: &[f32], c: &[f32]) -> Vec<f32> {
    let cpu = Cpu::new(Some(1));
    let buffer = |numbers: &[f32]| {
        let mut buffer = cpu.zeros(numbers.len(), Precision::F32).unwrap();
        cpu.upload(cpu.view_mut(&mut buffer, 0..numbers.len()), numbers).unwrap();
        buffer
    };
    let (a, b, mut c) = (buffer(a), buffer(b), buffer(c));
    let (a_len, b_len, c_len) = (cpu.len(&a), cpu.len(&b), cpu.len(&c));
    cpu.matmul(cpu.view_mut(&mut c, 0..c_len), cpu.view(&a, 0..a_len), cpu.view(&b, 0..b_len), how).unwrap();
    let mut to = vec![0.0; c_len];
    cpu.download(cpu.view(&c, 0..c_len), &mut to).unwrap();
    to
}

#[test]
fn products_are_the_processors_in_every_form() {
    let double = Double::new();
    let gpu = double.gpu();
    let memory = |bytes: &[u8]| {
        let memory = gpu.allocate(bytes.len()).unwrap();
        gpu.write(Gpu::address(&memory), bytes).unwrap();
        memory
    };
    let (m, n, k) = (5, 3, 8);
    use Precision::{Bf16, F32};
    for (precision, c_precision) in [(F32, F32), (Bf16, Bf16), (Bf16, F32)] {
        for form in 0..8 {
            let (a_transposed, b_transposed, accumulate) = (form & 1 != 0, form & 2 != 0, form & 4 != 0);
            let how = Matmul { m, n, k, a_transposed, b_transposed, accumulate, alpha: 0.5 };
            let (a, b, c) = (numbers(m * k, 1), numbers(k * n, 2), numbers(m * n, 3));
            let on = [(&a, precision), (&b, precision), (&c, c_precision)].map(|(x, kind)| memory(&to_bytes(x, kind)));
            let [a_at, b_at, c_at] = [0, 1, 2].map(|which| Gpu::address(&on[which]));
            gpu.gemm(&Gemm { how, c: c_at, c_precision, a: a_at, b: b_at, precision }).unwrap();
            let mut bytes = vec![0; m * n * c_precision.bytes()];
            gpu.read(c_at, &mut bytes).unwrap();
            let right = from_bytes(&to_bytes(&by_cpu(how, &a, &b, &c), c_precision), c_precision);
            assert_eq!(from_bytes(&bytes, c_precision), right, "{how:?} {precision:?} {c_precision:?}");
        }
    }
}

#[test]
fn the_way_of_a_product_is_asked_once_for_each_shape() {
    let double = Double::new();
    let gpu = double.gpu();
    let memory = gpu.allocate(1 << 16).unwrap();
    let base = Gpu::address(&memory);
    let product = |m, n, k, a_transposed, b_transposed, accumulate, offset: u64| Gemm {
        how: Matmul { m, n, k, a_transposed, b_transposed, accumulate, alpha: 1.0 },
        c: base + 32768,
        c_precision: Precision::F32,
        a: base + offset,
        b: base + 8192,
        precision: Precision::Bf16,
    };
    double.forget();
    for accumulate in [false, true, false] {
        gpu.gemm(&product(5, 3, 8, false, false, accumulate, 0)).unwrap();
    }
    gpu.gemm(&product(5, 3, 8, true, true, false, 0)).unwrap();
    // Another alignment is another way.
    gpu.gemm(&product(5, 3, 8, false, false, false, 6)).unwrap();
    gpu.gemm(&product(5, 3, 8, false, false, false, 256)).unwrap();
    // Of nothing: zeros, or what was there.
    gpu.gemm(&product(5, 3, 0, false, false, false, 0)).unwrap();
    gpu.gemm(&product(5, 3, 0, false, false, true, 0)).unwrap();
    gpu.gemm(&product(0, 3, 8, false, false, false, 0)).unwrap();
    // cublasLt has matrices by columns, [type rows x columns leading dimension]: its first
    // factor is our B's memory, its second our A's. bf16 is 14, f32 0 (library_types.h).
    let begin = "heuristic compute 68 scale 0";
    let end = "workspace 67108864 reduction 2";
    let c = "[0 3x5 3] [0 3x5 3]";
    let matmul = |beta: u32| format!("matmul 1 {beta} 67108864");
    assert_eq!(
        double.log(),
        [
            format!("{begin} op 0 0 [14 3x8 3] [14 8x5 8] {c} {end} align 256 256 256 256"),
            matmul(0),
            matmul(1),
            matmul(0),
            format!("{begin} op 1 1 [14 8x3 8] [14 5x8 5] {c} {end} align 256 256 256 256"),
            matmul(0),
            format!("{begin} op 0 0 [14 3x8 3] [14 8x5 8] {c} {end} align 256 2 256 256"),
            matmul(0),
            matmul(0),
            "set 60 0".into(),
        ]
    );
}

#[test]
fn a_product_that_cublaslt_refuses_is_named() {
    let double = Double::new();
    let gpu = double.gpu();
    let memory = gpu.allocate(4096).unwrap();
    let at = Gpu::address(&memory);
    let how = Matmul { m: 2, n: 3, k: 4, a_transposed: true, b_transposed: false, accumulate: false, alpha: 1.0 };
    let gemm = Gemm { how, c: at, c_precision: Precision::F32, a: at + 1024, b: at + 2048, precision: Precision::F32 };
    double.fail("cublasLtMatmulAlgoGetHeuristic", 15, 0);
    let text = failed(gpu.gemm(&gemm));
    assert!(text.starts_with("GPU 0 (Double 0, "), "{text}");
    let product = "the 2 x 3 matrix product over 4 (Aᵀ · B, F32 to F32)";
    let why = "failed: CUBLAS_STATUS_NOT_SUPPORTED (15): the functionality is not supported";
    assert!(text.ends_with(&format!(": preparing {product} {why}")), "{text}");
    double.fail("cublasLtMatmul", 15, 0);
    let text = failed(gpu.gemm(&gemm));
    assert!(text.ends_with(&format!(": {product} {why}")), "{text}");
}

#[test]
fn errors_say_what_happened_where_and_what_helps() {
    let double = Double::new();
    let gpu = double.gpu();
    let memory = gpu.allocate(2048).unwrap();
    let at = Gpu::address(&memory);
    let who = "GPU 0 (Double 0, GPU-00112233-4455-6677-8899-aabbccddeeff, 0000:a7:00.0)";

    double.fail("cuEventQuery", 214, 0);
    assert_eq!(
        failed(gpu.read(at, &mut [0; 8])),
        format!(
            "{who}: waiting for the GPU's work failed: CUDA_ERROR_ECC_UNCORRECTABLE (214): uncorrectable ECC error \
             encountered; the GPU's memory is faulty: drain the node, and see nvidia-smi -q -d ECC"
        )
    );
    double.fail("cuLaunchKernel", 700, 0);
    let text = failed(gpu.launch("plain_3", [4, 1, 1], 128, 0, &Arguments::new().int(1).int(2).int(3)));
    let begin =
        format!("{who}: starting plain_3 on 4 x 1 x 1 blocks of 128 failed: CUDA_ERROR_ILLEGAL_ADDRESS (700): ");
    assert!(text.starts_with(&begin), "{text}");
    for (function, doing) in [
        ("cuMemcpyHtoDAsync_v2", "copying 8 bytes to the GPU"),
        ("cuMemsetD8Async", "setting 1.5 KiB on the GPU"),
        ("cuMemcpyDtoDAsync_v2", "copying 8 bytes on the GPU"),
        ("cuStreamQuery", "waiting for the GPU's work"),
    ] {
        // 12345 is no error that the driver knows.
        double.fail(function, 12345, 0);
        let text = [gpu.write(at, &[1; 8]), gpu.set(at, 1536, 0), gpu.copy(at, at + 512, 8), gpu.finish()]
            .into_iter()
            .find(Result::is_err)
            .map(failed)
            .unwrap();
        let end = "failed: an error without a name (12345): the driver has no words for it";
        assert_eq!(text, format!("{who}: {doing} {end}"));
    }
}

#[test]
fn errors_of_the_node_are_told_from_the_users() {
    // The names and numbers of cuda.h.
    for (code, name, hardware, cure) in [
        (100, "CUDA_ERROR_NO_DEVICE", false, "ask Slurm for GPUs"),
        (802, "CUDA_ERROR_SYSTEM_NOT_READY", true, "fabric manager"),
    ] {
        let double = Double::new();
        double.fail("cuInit", code, 0);
        let error = double.try_gpu(Stop::new()).unwrap_err();
        let text = error.to_string();
        let begin = format!("starting CUDA with {} failed: {name} ({code}): ", double.path.display());
        assert!(text.starts_with(&begin) && text.contains(cure), "{text}");
        assert_eq!(error.may_pass(), hardware, "{text}");
    }
    let double = Double::new();
    double.fail("cuModuleLoadData", 222, 0);
    let error = double.try_gpu(Stop::new()).unwrap_err();
    assert!(
        error.to_string().contains("loading the kernels failed: CUDA_ERROR_UNSUPPORTED_PTX_VERSION (222)"),
        "{error}"
    );
    assert!(error.to_string().ends_with("install an older NVRTC or a newer driver"), "{error}");
    assert!(!error.may_pass());
    // Device unavailable, ECC, NVLink, contained, fallen off the bus; not: no device, a
    // wrong argument, no memory, an illegal address.
    assert!([46, 214, 220, 226, 304, 802, 999].into_iter().all(is_hardware));
    assert!(![0, 1, 2, 100, 101, 222, 600, 700, 719].into_iter().any(is_hardware));
}

#[test]
fn too_little_memory_is_the_users_or_another_processs() {
    let double = Double::new();
    let gpu = double.gpu();
    let Err(EngineError::Wrong(text)) = gpu.allocate(17 << 30) else { panic!("17 of 16 GiB") };
    assert!(
        text.ends_with(
            ": no memory for 17.0 GiB more: 15.9 GiB of 16.0 GiB are free, this process has 64.0 MiB; \
             take more GPUs, a smaller micro-batch or shorter sequences"
        ),
        "{text}"
    );
    double.others(12 << 30);
    let text = failed(gpu.allocate(8 << 30));
    assert!(text.ends_with("; another process has up to 12.0 GiB: see nvidia-smi on the node"), "{text}");
    // Too large also without the other.
    assert!(matches!(gpu.allocate(17 << 30), Err(EngineError::Wrong(_))));
    drop(gpu);
    double.others(16 << 30);
    assert!(double.try_gpu(Stop::new()).unwrap_err().may_pass());
}

#[test]
fn no_wait_outlives_the_group() {
    let double = Double::new();
    let stop = Stop::new();
    let gpu = double.gpu_with(stop.clone());
    let memory = gpu.allocate(1024).unwrap();
    let at = Gpu::address(&memory);
    let other = Stream::new(gpu.context()).unwrap();
    double.set("double_stuck", 1);
    let event = other.record().unwrap();
    assert!(!event.is_done().unwrap() && !other.is_done().unwrap());
    let breaker = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        stop.set();
    });
    let began = Instant::now();
    assert_eq!(gpu.finish(), Err(EngineError::Stopped));
    assert!(began.elapsed() >= Duration::from_millis(100));
    assert_eq!(gpu.read(at, &mut [0; 8]), Err(EngineError::Stopped));
    // The ring is full of what is never read.
    assert_eq!(gpu.write(at, &vec![0; 5 * PIECE]), Err(EngineError::Stopped));
    assert_eq!(event.finish(), Err(EngineError::Stopped));
    assert_eq!(other.finish(), Err(EngineError::Stopped));
    // What may be in use is not given back: the stand-in ends a process that tries.
    drop(event);
    drop(other);
    drop(memory);
    drop(gpu);
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    let [device, host, events, streams] = double.live();
    assert!(device >= 2 && host >= 6, "{device} {host}");
    assert_eq!((events, streams), (0, 0));
    breaker.join().unwrap();
}

#[test]
fn memory_that_is_dropped_while_the_gpu_works_ends_with_the_group() {
    let double = Double::new();
    let stop = Stop::new();
    let gpu = double.gpu_with(stop.clone());
    let memory = gpu.allocate(1024).unwrap();
    double.set("double_stuck", 1);
    let began = Instant::now();
    let breaker = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        stop.set();
    });
    drop(memory);
    assert!((Duration::from_millis(100)..Duration::from_secs(1)).contains(&began.elapsed()));
    breaker.join().unwrap();
}

#[test]
fn streams_wait_for_each_others_events() {
    let double = Double::new();
    let gpu = double.gpu();
    let other = Stream::new(gpu.context()).unwrap();
    let event = gpu.stream().record().unwrap();
    other.wait_for(&event).unwrap();
    assert!(event.is_done().unwrap());
    event.finish().unwrap();
    assert_eq!(double.log(), ["wait_event 1"]);
    assert_ne!(other.raw(), gpu.stream().raw());
    // From a thread that has not been here before.
    std::thread::scope(|scope| scope.spawn(|| other.finish().unwrap()).join().unwrap());
}

#[test]
fn libraries_and_driver_are_to_fit() {
    // CUDA Compatibility, minor version compatibility: code of 12.x on every driver of 12,
    // PTX only on a driver of its version.
    for (driver, library, cubin, ptx) in [
        (12040, (12, 4), true, true),
        (12040, (12, 8), true, false),
        (13000, (12, 8), true, true),
        (12080, (13, 0), false, false),
        (13010, (13, 1), true, true),
    ] {
        assert_eq!(fits(driver, library, Target::Cubin(90)).is_ok(), cubin, "{driver} {library:?}");
        assert_eq!(fits(driver, library, Target::Ptx(90)).is_ok(), ptx, "{driver} {library:?}");
    }
    let why = fits(12080, (13, 0), Target::Cubin(90)).unwrap_err();
    let error = StartError::OldDriver { driver: 12080, path: "/l/libnvrtc.so.13".into(), library: (13, 0), why };
    assert_eq!(
        error.to_string(),
        "the driver is for CUDA 12.8, /l/libnvrtc.so.13 is of CUDA 13.0: a library of a later major version needs \
         a newer driver; install a driver for CUDA 13.0 or newer, or the library of CUDA 12.8"
    );
}

#[test]
fn real_cublaslt_has_all_functions_and_says_that_there_is_no_gpu() {
    let Some(path) = libraries::find("libcublasLt.so.") else { return };
    let library = Library::open(&path).unwrap();
    let table = sys::BlasLt::load(&library).unwrap();
    // SAFETY: reads nothing.
    let version = unsafe { (table.version)() };
    assert!(version >= 120_000, "{version}");
    // On a machine with a driver and a GPU it may start.
    if let Err(error) = Blas::new(&library) {
        assert!(error.to_string().contains(" failed: CUBLAS_STATUS_"), "{error}");
        println!("{error}");
    }
}

#[test]
fn with_real_nvrtc_the_stand_in_starts() {
    let (Some(nvrtc), Some(builtins)) = (libraries::find("libnvrtc.so."), libraries::find("libnvrtc-builtins.so."))
    else {
        return;
    };
    let double = Double::new();
    let place = tempfile::tempdir().unwrap();
    let cache = Cache::at(&place.path().join("kernels"));
    let start = |places: &Places| start_with(places, 0, Stop::new(), &cache);
    let places = |driver: &Path| Places {
        driver: driver.to_path_buf(),
        nvrtc: nvrtc.clone(),
        nvrtc_builtins: Some(builtins.clone()),
        cublaslt: double.path.clone(),
    };
    // The kernels are real machine code, in which the stand-in finds no names.
    match start(&places(&double.path)) {
        Ok(gpu) => assert_eq!(gpu.architecture(), 90),
        Err(error) => assert!(error.to_string().contains("looking for the kernel"), "{error}"),
    }
    // NVRTC and cublasLt of scripts/cuda-libraries are of CUDA 13.
    double.set("double_version", 12080);
    let error = start(&places(&double.path)).unwrap_err();
    let why = format!("the driver is for CUDA 12.8, {} is of CUDA 13.0: ", nvrtc.display());
    assert!(error.to_string().starts_with(&why) && !error.may_pass(), "{error}");
    double.set("double_version", 13000);
    double.set("double_architecture", 75);
    assert_eq!(
        start(&places(&double.path)).unwrap_err().to_string(),
        "GPU 0 (Double 0, GPU-00112233-4455-6677-8899-aabbccddeeff, 0000:a7:00.0) has compute capability 7.5: the \
         kernels need 8.0 (Ampere) or newer; take another GPU, or set train.device = \"cpu\""
    );
    // Newer than NVRTC: PTX, which needs a driver of NVRTC's CUDA.
    double.set("double_architecture", 150);
    double.fail("cuModuleLoadData", 222, 0);
    let error = start(&places(&double.path)).unwrap_err();
    assert!(error.to_string().contains("CUDA_ERROR_UNSUPPORTED_PTX_VERSION"), "{error}");
    let error = start(&places(Path::new("/nowhere/libcuda.so.1"))).unwrap_err().to_string();
    assert!(error.starts_with("/nowhere/libcuda.so.1 cannot be loaded: "), "{error}");
}
