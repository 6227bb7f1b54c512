//! Matrix products by cublasLt. How a product of one shape is computed is asked once and
//! kept. Nothing here waits, and nothing is given back: that may wait for the device, and
//! all of it is needed until the process ends.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Mutex;

use super::device::Gemm;
use super::driver::lock;
use super::start::StartError;
use super::sys::{self, BlasLt};
use crate::dynamic::Library;
use crate::engine::Precision;

/// What decides how a product is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    m: usize,
    n: usize,
    k: usize,
    a_transposed: bool,
    b_transposed: bool,
    precision: Precision,
    c_precision: Precision,
    /// Powers of two, at most 256, that the addresses of A, B and C are multiples of.
    align: [u32; 3],
}

impl Key {
    fn of(gemm: &Gemm) -> Key {
        let align = |address: u64| 1 << address.trailing_zeros().min(8);
        Key {
            m: gemm.how.m,
            n: gemm.how.n,
            k: gemm.how.k,
            a_transposed: gemm.how.a_transposed,
            b_transposed: gemm.how.b_transposed,
            precision: gemm.precision,
            c_precision: gemm.c_precision,
            align: [align(gemm.a), align(gemm.b), align(gemm.c)],
        }
    }
}

/// How products of one [`Key`] are computed.
#[derive(Debug, Clone, Copy)]
struct Plan {
    descriptor: sys::MatmulDescriptor,
    first: sys::Layout,
    second: sys::Layout,
    result: sys::Layout,
    algorithm: sys::Algorithm,
}

/// cublasLt, and the plans so far.
pub struct Blas {
    table: BlasLt,
    handle: sys::BlasHandle,
    plans: Mutex<HashMap<Key, Plan>>,
}

type Result<T> = std::result::Result<T, String>;

impl Blas {
    /// Starts it, on the thread's current context.
    ///
    /// # Errors
    /// A library that lacks a function, or does not start.
    pub fn new(library: &Library) -> std::result::Result<Blas, StartError> {
        let table = BlasLt::load(library)?;
        let mut handle = sys::BlasHandle::NULL;
        // SAFETY: given where to write the handle.
        let status = unsafe { (table.create)(&raw mut handle) };
        let blas = Blas { table, handle, plans: Mutex::new(HashMap::new()) };
        let path = library.path().display();
        blas.check(status, || format!("starting cublasLt {}, {path},", blas.version())).map_err(StartError::Blas)?;
        Ok(blas)
    }

    /// "13.1.0".
    #[must_use]
    pub fn version(&self) -> String {
        // SAFETY: reads nothing.
        let version = unsafe { (self.table.version)() };
        format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
    }

    /// See [`Gemm`]; no size is 0. `workspace` bytes at `scratch` are this stream's alone.
    ///
    /// # Errors
    /// cublasLt's, in a line.
    pub fn matmul(&self, gemm: &Gemm, stream: sys::Stream, scratch: u64, workspace: usize) -> Result<()> {
        let key = Key::of(gemm);
        let known = lock(&self.plans).get(&key).copied();
        let plan = match known {
            Some(plan) => plan,
            None => {
                let plan = self.plan(&key, workspace)?;
                lock(&self.plans).insert(key, plan);
                plan
            }
        };
        let alpha = gemm.how.alpha;
        let beta: f32 = if gemm.how.accumulate { 1.0 } else { 0.0 };
        let c = gemm.c as *mut c_void;
        // Row-major C = A · B is, by columns, Cᵀ = Bᵀ · Aᵀ of the same memory.
        // SAFETY: the plan's parts exist; alpha and beta are read before the call returns;
        // the rest are addresses on the device, and a wrong one is the GPU's error.
        let status = unsafe {
            (self.table.matmul)(
                self.handle,
                plan.descriptor,
                (&raw const alpha).cast(),
                gemm.b as *const c_void,
                plan.first,
                gemm.a as *const c_void,
                plan.second,
                (&raw const beta).cast(),
                c,
                plan.result,
                c,
                plan.result,
                &raw const plan.algorithm,
                scratch as *mut c_void,
                workspace,
                stream,
            )
        };
        self.check(status, || key.to_string())
    }

    /// Asks for the best way.
    fn plan(&self, key: &Key, workspace: usize) -> Result<Plan> {
        let doing = || format!("preparing {key}");
        let operation = |transposed: bool| if transposed { sys::OPERATION_TRANSPOSE } else { sys::OPERATION_NONE };
        let mut descriptor = sys::MatmulDescriptor::NULL;
        // SAFETY: given where to write the descriptor.
        let status = unsafe { (self.table.descriptor_create)(&raw mut descriptor, sys::COMPUTE_F32, sys::TYPE_F32) };
        self.check(status, doing)?;
        let operations =
            [(sys::DESCRIPTOR_TRANSPOSE_A, key.b_transposed), (sys::DESCRIPTOR_TRANSPOSE_B, key.a_transposed)];
        for (which, transposed) in operations {
            let value = operation(transposed);
            // SAFETY: the descriptor exists, and the value is an i32, as both attributes are.
            let status = unsafe { (self.table.descriptor_set)(descriptor, which, (&raw const value).cast(), 4) };
            self.check(status, doing)?;
        }
        // In memory a factor's rows are as they lie, not as they are used.
        let lying =
            |rows: usize, columns: usize, transposed: bool| if transposed { (columns, rows) } else { (rows, columns) };
        let first = self.layout(key.precision, lying(key.k, key.n, key.b_transposed), doing)?;
        let second = self.layout(key.precision, lying(key.m, key.k, key.a_transposed), doing)?;
        let result = self.layout(key.c_precision, (key.m, key.n), doing)?;
        let mut found = sys::Heuristic::default();
        let mut count: c_int = 0;
        let preference = self.preference(key, workspace)?;
        // SAFETY: all parts exist; asked for one answer, of which there is room for one.
        let status = unsafe {
            (self.table.heuristic)(
                self.handle,
                descriptor,
                first,
                second,
                result,
                result,
                preference,
                1,
                &raw mut found,
                &raw mut count,
            )
        };
        // SAFETY: made above, and used no more.
        let _ = unsafe { (self.table.preference_destroy)(preference) };
        self.check(status, doing)?;
        if count < 1 {
            return Err(format!("cublasLt {} knows no way for {key}: install a newer one", self.version()));
        }
        self.check(found.state, doing)?;
        Ok(Plan { descriptor, first, second, result, algorithm: found.algorithm })
    }

    /// A row-major matrix, by columns: its rows are the columns.
    fn layout(
        &self,
        precision: Precision,
        (rows, columns): (usize, usize),
        doing: impl Fn() -> String,
    ) -> Result<sys::Layout> {
        let kind = match precision {
            Precision::F32 => sys::TYPE_F32,
            Precision::Bf16 => sys::TYPE_BF16,
        };
        let mut layout = sys::Layout::NULL;
        let leading = i64::try_from(columns).map_err(|_| format!("{} failed: too large", doing()))?;
        // SAFETY: given where to write the layout.
        let status = unsafe { (self.table.layout_create)(&raw mut layout, kind, columns as u64, rows as u64, leading) };
        self.check(status, doing)?;
        Ok(layout)
    }

    /// What an answer has to fit.
    fn preference(&self, key: &Key, workspace: usize) -> Result<sys::Preference> {
        let doing = || format!("preparing {key}");
        let mut preference = sys::Preference::NULL;
        // SAFETY: given where to write the preference.
        self.check(unsafe { (self.table.preference_create)(&raw mut preference) }, doing)?;
        let workspace = workspace as u64;
        // SAFETY: the preference exists, and this attribute is a u64.
        let set = |which: c_int, value: *const c_void, size: usize| unsafe {
            (self.table.preference_set)(preference, which, value, size)
        };
        self.check(set(sys::PREFERENCE_WORKSPACE, (&raw const workspace).cast(), 8), doing)?;
        let [a, b, c] = key.align;
        let numbers = [
            (sys::PREFERENCE_REDUCTION, sys::REDUCTION_COMPUTE_TYPE),
            (sys::PREFERENCE_ALIGNMENT_A, b),
            (sys::PREFERENCE_ALIGNMENT_B, a),
            (sys::PREFERENCE_ALIGNMENT_C, c),
            (sys::PREFERENCE_ALIGNMENT_D, c),
        ];
        for (which, value) in numbers {
            self.check(set(which, (&raw const value).cast(), 4), doing)?;
        }
        Ok(preference)
    }

    /// A status as a result.
    fn check(&self, status: c_int, doing: impl FnOnce() -> String) -> Result<()> {
        if status == sys::SUCCESS {
            return Ok(());
        }
        let word = |function: unsafe extern "C" fn(c_int) -> *const c_char| {
            // SAFETY: gives a static string for any number.
            let text = unsafe { function(status) };
            // SAFETY: as above.
            if text.is_null() { "?".into() } else { unsafe { CStr::from_ptr(text) }.to_string_lossy() }
        };
        let (name, text) = (word(self.table.status_name), word(self.table.status_string));
        Err(format!("{} failed: {name} ({status}): {text}", doing()))
    }
}

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Key { m, n, k, precision, c_precision, .. } = self;
        let mark = |transposed: bool| if transposed { "ᵀ" } else { "" };
        let (a, b) = (mark(self.a_transposed), mark(self.b_transposed));
        write!(f, "the {m} x {n} matrix product over {k} (A{a} · B{b}, {precision:?} to {c_precision:?})")
    }
}
