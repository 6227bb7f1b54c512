"""An id from rank 0 to all ranks, and what this rank was given, through the C interface.

    srun -N2 --ntasks-per-node=2 --palingenesis=store python3 exchange.py [LIBRARY]
"""

import ctypes
import json
import sys

lib = ctypes.CDLL(sys.argv[1] if len(sys.argv) > 1 else "libpalingenesis.so")
lib.palingenesis_free.argtypes = [ctypes.c_void_p]
lib.palingenesis_plan_json.argtypes = [ctypes.POINTER(ctypes.c_void_p)]
lib.palingenesis_exchange_id.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_uint32,
    ctypes.POINTER(ctypes.c_void_p),
]


def take(text):
    """The library's string, given back to it."""
    copy = ctypes.string_at(text).decode()
    lib.palingenesis_free(text)
    return copy


text = ctypes.c_void_p()
if lib.palingenesis_plan_json(ctypes.byref(text)) != 0:
    sys.exit(take(text))
plan = json.loads(take(text))
rank = plan["step"]["rank"]

identity = ctypes.create_string_buffer(128)
if rank == 0:
    identity.value = b"made by rank 0"
if lib.palingenesis_exchange_id(identity, len(identity), 60, ctypes.byref(text)) != 0:
    sys.exit(f"rank {rank}: {take(text)}")
print(f"rank {rank} of {plan['step']['world_size']} has the id {identity.value.decode()}")
