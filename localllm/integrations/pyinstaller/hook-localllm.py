"""PyInstaller's hook: modules that are imported by name, and the source files that kernels are compiled from."""

from importlib.util import find_spec

from PyInstaller.utils.hooks import collect_data_files, collect_submodules, copy_metadata

hiddenimports = collect_submodules("localllm", filter=lambda name: not name.startswith("localllm.integrations"))
hiddenimports += ["filelock", "huggingface_hub", "huggingface_hub.constants", "huggingface_hub.errors"]
datas = collect_data_files("localllm") + copy_metadata("llguidance")

module_collection_mode = "py"  # as files, with their sources
numba = find_spec("numba")
if numba is not None and numba.submodule_search_locations:  # cached kernels depend on numba's version
    datas += [(f"{numba.submodule_search_locations[0]}/_version.py", "numba")]
