"""The names of vLLM's attention backends, and how one is added."""

from enum import Enum
from importlib import import_module


class AttentionBackendEnum(Enum):
    FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
    CUSTOM = None

    @classmethod
    def register(cls, name, value):
        if name in cls._member_map_:
            raise ValueError(f"Backend {name} already exists")
        member = object.__new__(cls)
        member._name_, member._value_ = name, value
        setattr(cls, name, member)
        cls._member_map_[name] = member
        return member

    def get_class(self):
        module, _, name = _OVERRIDES.get(self, self.value).rpartition(".")
        return getattr(import_module(module), name)


_OVERRIDES = {}


def register_backend(backend, class_path=None, is_mamba=False):
    if isinstance(backend, str):
        backend = AttentionBackendEnum.register(backend, class_path or "")
    if class_path is not None:
        _OVERRIDES[backend] = class_path
    return lambda cls: cls
