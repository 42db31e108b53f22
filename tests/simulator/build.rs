//! Binds the library's references to its own functions at link time.
//!
//! Its tables of functions would otherwise be filled by the loader by name, and a fault that takes
//! a name away (`cuda.missing_symbols`) would keep the library from loading.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
}
