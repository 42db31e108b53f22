"""Writes src/nvml/symbols.txt and src/nvml/not_supported.rs: every function of NVML that no other module defines.

The names are those of the bindings in the crate nvml-wrapper-sys and of PyPI's nvidia-ml-py:

    python3 clients/nvml_symbols.py path/to/nvml-wrapper-sys/src/bindings.rs path/to/pynvml.py
"""

import pathlib
import re
import sys

HEADER = '''//! Functions of NVML that no simulated GPU supports: each is there under its name and says so.
//!
//! Written by `clients/nvml_symbols.py`: every name in `symbols.txt` (the functions of the crate nvml-wrapper-sys 0.10 and
//! of PyPI's nvidia-ml-py 13.615) that no other module defines.

use super::system::not_supported;
use nvml_wrapper_sys::bindings as sys;

macro_rules! unsupported {
    ($($name:ident)*) => {$(
        #[allow(unsafe_code, reason = "exported under NVML's name")]
        #[unsafe(no_mangle)]
        extern "C" fn $name() -> sys::nvmlReturn_t {
            not_supported(stringify!($name))
        }
    )*};
}

unsupported! {
'''


def main() -> None:
    bindings, python = (pathlib.Path(argument).read_text() for argument in sys.argv[1:3])
    names = set(re.findall(r"pub unsafe fn (nvml\w+)", bindings))
    names |= set(re.findall(r'_nvmlGetFunctionPointer\("(nvml\w+)"\)', python))
    folder = pathlib.Path(__file__).parent.parent / "src" / "nvml"
    (folder / "symbols.txt").write_text("".join(f"{name}\n" for name in sorted(names)))
    defined = set()
    for file in folder.glob("*.rs"):
        if file.name == "not_supported.rs":
            continue
        text = file.read_text()
        defined |= set(re.findall(r"\bfn (nvml\w+)\(", text))
        defined |= set(re.findall(r"^    (nvml\w+)(?:\(.*\);)?$", text, re.MULTILINE))
    rest = sorted(names - defined)
    (folder / "not_supported.rs").write_text(HEADER + "".join(f"    {name}\n" for name in rest) + "}\n")
    print(f"{len(defined)} functions are answered, {len(rest)} are not supported")


main()
