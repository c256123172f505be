"""The arithmetic of `strobe.places`, compiled for the device: one source for the host and Triton."""

from strobe import places
from strobe.kernels.common.device_function import device_function

position_of = device_function(places.position_of)
number_before = device_function(places.number_before)
