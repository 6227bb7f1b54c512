/* A stand-in for libnvrtc.so whose compiler makes nothing: the kernels of the stand-in for
 * libcuda.so.1 are compiled elsewhere. */
#include <string.h>

static const char image[] = "no machine code";
int nvrtcVersion(int *major, int *minor) { *major = 13; *minor = 0; return 0; }
const char *nvrtcGetErrorString(int code) { (void)code; return "an error"; }
int nvrtcGetNumSupportedArchs(int *count) { *count = 2; return 0; }
int nvrtcGetSupportedArchs(int *all) { all[0] = 80; all[1] = 90; return 0; }
int nvrtcCreateProgram(void **program, const char *text, const char *name, int headers, const char *const *texts,
                       const char *const *names) {
    (void)name, (void)headers, (void)texts, (void)names;
    *program = (void *)image;
    return strlen(text) > 10000 ? 0 : 5;
}
int nvrtcDestroyProgram(void **program) { *program = 0; return 0; }
int nvrtcCompileProgram(void *program, int count, const char *const *options) { (void)program, (void)count, (void)options; return 0; }
int nvrtcGetProgramLogSize(void *program, size_t *size) { (void)program; *size = 1; return 0; }
int nvrtcGetProgramLog(void *program, char *log) { (void)program; *log = 0; return 0; }
int nvrtcGetCUBINSize(void *program, size_t *size) { (void)program; *size = sizeof image; return 0; }
int nvrtcGetCUBIN(void *program, char *to) { (void)program; memcpy(to, image, sizeof image); return 0; }
int nvrtcGetPTXSize(void *program, size_t *size) { (void)program; *size = sizeof image; return 0; }
int nvrtcGetPTX(void *program, char *to) { (void)program; memcpy(to, image, sizeof image); return 0; }
