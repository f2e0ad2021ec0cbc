"""What storing KV in 8 bits costs in quality: calibration of static scales, and measurement.

from vattn.models.loader import load_model
from vattn.lab.quality import calibrate

calibrate(load_model("smollm2")).save("smollm2.safetensors")
LLM("smollm2", kv_cache_dtype="int8", kv_scales="smollm2.safetensors")
"""

from __future__ import annotations

from vattn.kv.ranges import KVRanges
from vattn.lab.quality.calibrate import calibrate

__all__ = ["KVRanges", "calibrate"]
