"""Which backends there are. Their modules, and the libraries under these, are imported when a class is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from enum import Enum, EnumMeta
from typing import Any

from mla_prefill.backends.base import MLAPrefillBackend

__all__ = ["MLAPrefillBackendEnum", "register_mla_prefill_backend"]

_overrides: dict[str, str | type] = {}  # by the member's name
_generation = 0  # of what is registered; grows with each change


class _NamesItsMembers(EnumMeta):
    def __getitem__(cls, name: str) -> Any:
        try:
            return super().__getitem__(name)
        except KeyError:
            raise ValueError(f"backend: expected one of {', '.join(cls.__members__)}, got {name!r}") from None


class MLAPrefillBackendEnum(Enum, metaclass=_NamesItsMembers):
    """The backends by name, each with the dotted path of its class."""

    NATIVE = "mla_prefill.backends.native.NativePrefillBackend"
    FLASH_ATTN = "mla_prefill.backends.flash_attn.FlashAttnPrefillBackend"
    FLASHINFER = "mla_prefill.backends.flashinfer.FlashInferPrefillBackend"
    TRTLLM_RAGGED = "mla_prefill.backends.trtllm_ragged.TrtllmRaggedPrefillBackend"
    SDPA = "mla_prefill.backends.sdpa.SdpaPrefillBackend"
    CUSTOM = None  # a place for a backend of the user's, to be registered before use

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """By name, so that a registered member survives a process boundary if it is registered there too."""
        return _member, (self.name,)

    def get_path(self) -> str:
        """The class's dotted path, that of the override if there is one.

        Raises:
            ValueError: CUSTOM, while nothing is registered for it.
        """
        return _path_of(self._target())

    def get_class(self) -> type[MLAPrefillBackend]:
        """The class, imported.

        Raises:
            ImportError: there is no class under the path.
            ValueError: CUSTOM, while nothing is registered for it.
        """
        target = self._target()
        if not isinstance(target, str):
            return target
        module, _, name = target.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ImportError(f"{self.name}: expected a class at {target}, got {error}") from error
        if not isinstance(found, type):
            raise ImportError(f"{self.name}: expected a class at {target}, got {type(found).__name__}")
        return found

    def is_overridden(self) -> bool:
        return self.name in _overrides

    def clear_override(self) -> None:
        """Back to what the member stood for at first: for CUSTOM nothing."""
        if _overrides.pop(self.name, None) is not None:
            _changed()

    def _target(self) -> str | type:
        target = _overrides.get(self.name, self.value)
        if not target:
            raise ValueError(
                f"backend: expected {self.name} to be registered before it is used, got nothing: call "
                f'register_mla_prefill_backend(MLAPrefillBackendEnum.{self.name}, "package.module.Class")'
            )
        return target


def register_mla_prefill_backend(
    backend: MLAPrefillBackendEnum | str, class_path: str | None = None
) -> Callable[[type], type]:
    """Registers a backend class under a new name, for ``CUSTOM``, or in place of one of this package's.

    With a path the class is imported when it is asked for. Without one this is a class decorator. Registering the same
    again changes nothing, so a plugin may do it in every process.

    Args:
        backend: a member, or a new name in upper case, which becomes a member.
        class_path: ``package.module.Class``.

    Raises:
        ValueError: the name is no upper-case identifier, or stands for another class already (pass the member to
            replace it).
    """
    if class_path is None:

        def decorate(backend_class: type) -> type:
            _register(backend, backend_class)
            return backend_class

        return decorate
    parts = class_path.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ValueError(f"class_path: expected package.module.Class, got {class_path!r}")
    _register(backend, class_path)
    return lambda backend_class: backend_class


def generation() -> int:
    """Grows whenever what a member stands for may have changed."""
    return _generation


def _register(backend: MLAPrefillBackendEnum | str, target: str | type) -> None:
    member = _named(backend, _path_of(target)) if isinstance(backend, str) else backend
    if _overrides.get(member.name) != target:
        _overrides[member.name] = target
        _changed()


def _named(name: str, class_path: str) -> MLAPrefillBackendEnum:
    member = MLAPrefillBackendEnum.__members__.get(name)
    if member is not None:
        taken_by = _overrides.get(name, member.value)
        if taken_by is None or _path_of(taken_by) != class_path:
            raise ValueError(
                f"backend: expected a new name, got {name!r}, which stands for {taken_by}; "
                f"pass MLAPrefillBackendEnum.{name} to replace it"
            )
        return member
    if not name.isidentifier() or name != name.upper() or hasattr(MLAPrefillBackendEnum, name):
        raise ValueError(f"backend: expected an upper-case identifier, got {name!r}")
    member = object.__new__(MLAPrefillBackendEnum)
    member._name_, member._value_ = name, class_path
    setattr(MLAPrefillBackendEnum, name, member)
    MLAPrefillBackendEnum._member_map_[name] = member
    MLAPrefillBackendEnum._member_names_.append(name)
    return member


def _member(name: str) -> MLAPrefillBackendEnum:
    return MLAPrefillBackendEnum[name]


def _path_of(target: str | type) -> str:
    return target if isinstance(target, str) else f"{target.__module__}.{target.__qualname__}"


def _changed() -> None:
    global _generation
    _generation += 1
