//! CUDA's C interface, as far as it is used: the driver, NVRTC and cublasLt, each a table of
//! functions found by name at run time. Names, signatures and numbers are those of the
//! headers of CUDA 13.0 (cuda.h, nvrtc.h, cublasLt.h, cublas_api.h, library_types.h), which
//! are the same since CUDA 12.0. Nothing here calls any of them.

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::dynamic::{Library, LibraryError};

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(transparent)]
        pub struct $name(pub *mut c_void);

        // SAFETY: a name that CUDA gave; its functions may be called from any thread.
        unsafe impl Send for $name {}
        // SAFETY: as above.
        unsafe impl Sync for $name {}

        impl $name {
            /// None.
            pub const NULL: $name = $name(std::ptr::null_mut());
        }
    )*};
}

macro_rules! functions {
    ($(#[$doc:meta])* $name:ident { $($field:ident = $symbol:ident($($argument:ty),* $(,)?) -> $result:ty;)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy)]
        pub struct $name {
            $(
                #[doc = stringify!($symbol)]
                pub $field: unsafe extern "C" fn($($argument),*) -> $result,
            )*
        }

        impl $name {
            /// Finds all of them.
            ///
            /// # Errors
            /// Names the first that is missing.
            pub fn load(library: &Library) -> Result<$name, LibraryError> {
                Ok($name {
                    // SAFETY: the signatures are the header's.
                    $($field: unsafe { library.symbol(stringify!($symbol)) }?,)*
                })
            }
        }
    };
}

/// CUresult.
pub type Status = c_int;
/// CUdevice.
pub type Device = c_int;
/// CUdeviceptr.
pub type Address = u64;

handles! {
    /// CUcontext.
    Context;
    /// CUmodule.
    Module;
    /// CUfunction.
    Function;
    /// CUstream, which is cudaStream_t.
    Stream;
    /// CUevent.
    Event;
    /// nvrtcProgram.
    Program;
    /// cublasLtHandle_t.
    BlasHandle;
    /// cublasLtMatmulDesc_t.
    MatmulDescriptor;
    /// cublasLtMatrixLayout_t.
    Layout;
    /// cublasLtMatmulPreference_t.
    Preference;
}

/// CUuuid.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Uuid(pub [u8; 16]);

/// CUDA_SUCCESS, NVRTC_SUCCESS and CUBLAS_STATUS_SUCCESS.
pub const SUCCESS: Status = 0;
/// CUDA_ERROR_OUT_OF_MEMORY.
pub const OUT_OF_MEMORY: Status = 2;
/// CUDA_ERROR_STUB_LIBRARY: a libcuda to link with, not to run.
pub const STUB_LIBRARY: Status = 34;
/// CUDA_ERROR_DEVICE_UNAVAILABLE.
pub const DEVICE_UNAVAILABLE: Status = 46;
/// CUDA_ERROR_NO_DEVICE.
pub const NO_DEVICE: Status = 100;
/// CUDA_ERROR_INVALID_DEVICE.
pub const INVALID_DEVICE: Status = 101;
/// CUDA_ERROR_INVALID_IMAGE.
pub const INVALID_IMAGE: Status = 200;
/// CUDA_ERROR_NO_BINARY_FOR_GPU.
pub const NO_BINARY_FOR_GPU: Status = 209;
/// CUDA_ERROR_ECC_UNCORRECTABLE.
pub const ECC_UNCORRECTABLE: Status = 214;
/// CUDA_ERROR_NVLINK_UNCORRECTABLE.
pub const NVLINK_UNCORRECTABLE: Status = 220;
/// CUDA_ERROR_UNSUPPORTED_PTX_VERSION.
pub const UNSUPPORTED_PTX_VERSION: Status = 222;
/// CUDA_ERROR_CONTAINED: a memory error that ended this process alone.
pub const CONTAINED: Status = 226;
/// CUDA_ERROR_OPERATING_SYSTEM.
pub const OPERATING_SYSTEM: Status = 304;
/// CUDA_ERROR_NOT_READY: not an error, the work goes on.
pub const NOT_READY: Status = 600;
/// CUDA_ERROR_ILLEGAL_ADDRESS.
pub const ILLEGAL_ADDRESS: Status = 700;
/// CUDA_ERROR_LAUNCH_TIMEOUT.
pub const LAUNCH_TIMEOUT: Status = 702;
/// CUDA_ERROR_LAUNCH_FAILED.
pub const LAUNCH_FAILED: Status = 719;
/// CUDA_ERROR_SYSTEM_NOT_READY.
pub const SYSTEM_NOT_READY: Status = 802;
/// CUDA_ERROR_SYSTEM_DRIVER_MISMATCH.
pub const SYSTEM_DRIVER_MISMATCH: Status = 803;
/// CUDA_ERROR_UNKNOWN.
pub const UNKNOWN: Status = 999;

/// CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT.
pub const ATTRIBUTE_PROCESSORS: c_int = 16;
/// CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR.
pub const ATTRIBUTE_MAJOR: c_int = 75;
/// CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR.
pub const ATTRIBUTE_MINOR: c_int = 76;
/// CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES.
pub const FUNCTION_DYNAMIC_SHARED: c_int = 8;
/// CU_STREAM_NON_BLOCKING: does not wait for the default stream.
pub const STREAM_NON_BLOCKING: c_uint = 1;
/// CU_EVENT_DISABLE_TIMING.
pub const EVENT_DISABLE_TIMING: c_uint = 2;

functions! {
    /// The driver's, of libcuda.so.1: the names behind the macros of cuda.h.
    Cuda {
        init = cuInit(c_uint) -> Status;
        driver_version = cuDriverGetVersion(*mut c_int) -> Status;
        error_name = cuGetErrorName(Status, *mut *const c_char) -> Status;
        error_string = cuGetErrorString(Status, *mut *const c_char) -> Status;
        device_count = cuDeviceGetCount(*mut c_int) -> Status;
        device_get = cuDeviceGet(*mut Device, c_int) -> Status;
        device_name = cuDeviceGetName(*mut c_char, c_int, Device) -> Status;
        device_uuid = cuDeviceGetUuid_v2(*mut Uuid, Device) -> Status;
        device_pci_bus_id = cuDeviceGetPCIBusId(*mut c_char, c_int, Device) -> Status;
        device_attribute = cuDeviceGetAttribute(*mut c_int, c_int, Device) -> Status;
        context_retain = cuDevicePrimaryCtxRetain(*mut Context, Device) -> Status;
        context_set = cuCtxSetCurrent(Context) -> Status;
        memory_info = cuMemGetInfo_v2(*mut usize, *mut usize) -> Status;
        memory_allocate = cuMemAlloc_v2(*mut Address, usize) -> Status;
        memory_free = cuMemFree_v2(Address) -> Status;
        host_allocate = cuMemHostAlloc(*mut *mut c_void, usize, c_uint) -> Status;
        host_free = cuMemFreeHost(*mut c_void) -> Status;
        copy_to_device = cuMemcpyHtoDAsync_v2(Address, *const c_void, usize, Stream) -> Status;
        copy_to_host = cuMemcpyDtoHAsync_v2(*mut c_void, Address, usize, Stream) -> Status;
        copy_on_device = cuMemcpyDtoDAsync_v2(Address, Address, usize, Stream) -> Status;
        set_bytes = cuMemsetD8Async(Address, u8, usize, Stream) -> Status;
        stream_create = cuStreamCreate(*mut Stream, c_uint) -> Status;
        stream_destroy = cuStreamDestroy_v2(Stream) -> Status;
        stream_query = cuStreamQuery(Stream) -> Status;
        stream_wait_event = cuStreamWaitEvent(Stream, Event, c_uint) -> Status;
        event_create = cuEventCreate(*mut Event, c_uint) -> Status;
        event_destroy = cuEventDestroy_v2(Event) -> Status;
        event_record = cuEventRecord(Event, Stream) -> Status;
        event_query = cuEventQuery(Event) -> Status;
        module_load = cuModuleLoadData(*mut Module, *const c_void) -> Status;
        module_function = cuModuleGetFunction(*mut Function, Module, *const c_char) -> Status;
        function_set = cuFuncSetAttribute(Function, c_int, c_int) -> Status;
        launch = cuLaunchKernel(
            Function, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Stream, *mut *mut c_void, *mut *mut c_void,
        ) -> Status;
    }
}

functions! {
    /// The run-time compiler's, of libnvrtc.so. Its nvrtcResult is 0 where all is well.
    Nvrtc {
        version = nvrtcVersion(*mut c_int, *mut c_int) -> c_int;
        error_string = nvrtcGetErrorString(c_int) -> *const c_char;
        architecture_count = nvrtcGetNumSupportedArchs(*mut c_int) -> c_int;
        architectures = nvrtcGetSupportedArchs(*mut c_int) -> c_int;
        create = nvrtcCreateProgram(
            *mut Program, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char,
        ) -> c_int;
        destroy = nvrtcDestroyProgram(*mut Program) -> c_int;
        compile = nvrtcCompileProgram(Program, c_int, *const *const c_char) -> c_int;
        log_size = nvrtcGetProgramLogSize(Program, *mut usize) -> c_int;
        log = nvrtcGetProgramLog(Program, *mut c_char) -> c_int;
        cubin_size = nvrtcGetCUBINSize(Program, *mut usize) -> c_int;
        cubin = nvrtcGetCUBIN(Program, *mut c_char) -> c_int;
        ptx_size = nvrtcGetPTXSize(Program, *mut usize) -> c_int;
        ptx = nvrtcGetPTX(Program, *mut c_char) -> c_int;
    }
}

/// CUDA_R_32F of cudaDataType.
pub const TYPE_F32: c_int = 0;
/// CUDA_R_16BF.
pub const TYPE_BF16: c_int = 14;
/// CUBLAS_COMPUTE_32F: sums and factors in single precision, no TF32.
pub const COMPUTE_F32: c_int = 68;
/// CUBLASLT_MATMUL_DESC_TRANSA, of the first factor.
pub const DESCRIPTOR_TRANSPOSE_A: c_int = 3;
/// CUBLASLT_MATMUL_DESC_TRANSB, of the second.
pub const DESCRIPTOR_TRANSPOSE_B: c_int = 4;
/// CUBLAS_OP_N.
pub const OPERATION_NONE: i32 = 0;
/// CUBLAS_OP_T.
pub const OPERATION_TRANSPOSE: i32 = 1;
/// CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, a u64.
pub const PREFERENCE_WORKSPACE: c_int = 1;
/// CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, a u32.
pub const PREFERENCE_REDUCTION: c_int = 3;
/// CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE: parts of a sum are added up in its own precision
/// (others round each part to the result's first).
pub const REDUCTION_COMPUTE_TYPE: u32 = 2;
/// CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, a u32; 256 if not set.
pub const PREFERENCE_ALIGNMENT_A: c_int = 5;
/// CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES.
pub const PREFERENCE_ALIGNMENT_B: c_int = 6;
/// CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES.
pub const PREFERENCE_ALIGNMENT_C: c_int = 7;
/// CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES.
pub const PREFERENCE_ALIGNMENT_D: c_int = 8;

/// cublasLtMatmulAlgo_t.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct Algorithm(pub [u64; 8]);

/// cublasLtMatmulHeuristicResult_t.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct Heuristic {
    /// How to compute it.
    pub algorithm: Algorithm,
    /// Bytes it needs.
    pub workspace: usize,
    /// The rest counts only where this is 0.
    pub state: c_int,
    /// How well the GPU is filled.
    pub waves: f32,
    /// Of no meaning.
    pub reserved: [c_int; 4],
}

functions! {
    /// Of libcublasLt.so. Its cublasStatus_t is 0 where all is well; matrices lie by columns.
    BlasLt {
        version = cublasLtGetVersion() -> usize;
        cuda_version = cublasLtGetCudartVersion() -> usize;
        status_name = cublasLtGetStatusName(c_int) -> *const c_char;
        status_string = cublasLtGetStatusString(c_int) -> *const c_char;
        create = cublasLtCreate(*mut BlasHandle) -> c_int;
        descriptor_create = cublasLtMatmulDescCreate(*mut MatmulDescriptor, c_int, c_int) -> c_int;
        descriptor_set = cublasLtMatmulDescSetAttribute(MatmulDescriptor, c_int, *const c_void, usize) -> c_int;
        layout_create = cublasLtMatrixLayoutCreate(*mut Layout, c_int, u64, u64, i64) -> c_int;
        preference_create = cublasLtMatmulPreferenceCreate(*mut Preference) -> c_int;
        preference_set = cublasLtMatmulPreferenceSetAttribute(Preference, c_int, *const c_void, usize) -> c_int;
        preference_destroy = cublasLtMatmulPreferenceDestroy(Preference) -> c_int;
        heuristic = cublasLtMatmulAlgoGetHeuristic(
            BlasHandle, MatmulDescriptor, Layout, Layout, Layout, Layout, Preference, c_int, *mut Heuristic, *mut c_int,
        ) -> c_int;
        matmul = cublasLtMatmul(
            BlasHandle, MatmulDescriptor, *const c_void, *const c_void, Layout, *const c_void, Layout, *const c_void,
            *const c_void, Layout, *mut c_void, Layout, *const Algorithm, *mut c_void, usize, Stream,
        ) -> c_int;
    }
}

const _: () = assert!(size_of::<Heuristic>() == 96, "as cublasLt.h has it");
