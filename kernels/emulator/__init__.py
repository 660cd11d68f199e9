"""A CPU emulator for Gluon kernels: the real kernel source, run by threads that try to expose its races.

Gluon has no interpreter. Here a kernel's functions are rebound to CPU versions of what they call: partitions
become threads that pass one baton at random points; mbarriers keep phase, arrivals and bytes; a TMA copy
poisons its target with NaN and lands later; a warpgroup product reads shared memory when it retires, not
when it is issued. A schedule (seed and three policies) is reproducible. What is not modelled: layouts,
registers, shared-memory limits and the tensor core's rounding order; the ahead-of-time compile covers those.
"""

from workbench.kernels.emulator.errors import Deadlock, EmulatorError, Race
from workbench.kernels.emulator.launch import Emulator
from workbench.kernels.emulator.machine import SCHEDULES, Schedule
from workbench.kernels.emulator.recorder import Event, Flight, Recorder

__all__ = [
    "SCHEDULES",
    "Deadlock",
    "Emulator",
    "EmulatorError",
    "Event",
    "Flight",
    "Race",
    "Recorder",
    "Schedule",
]
