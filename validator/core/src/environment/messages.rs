//! The causes of messages that frameworks, CUDA and the dynamic loader print.

use std::sync::LazyLock;

use serde::Deserialize;

/// A message, its cause and its remedy.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KnownMessage {
    /// `driver_too_old`.
    pub id: String,
    /// Texts that all occur in the message.
    pub contains: Vec<String>,
    pub cause: String,
    pub remedy: String,
    /// A key of the table's sources.
    pub source: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    #[cfg_attr(
        not(test),
        expect(dead_code, reason = "for the reader of the data file")
    )]
    sources: std::collections::BTreeMap<String, String>,
    messages: Vec<KnownMessage>,
}

static TABLE: LazyLock<Table> = LazyLock::new(|| {
    serde_yaml::from_str(include_str!("../../data/environment_messages.yaml"))
        .expect("a test parses the embedded table")
});

/// The first row of the table that applies to the text.
pub fn explain_message(text: &str) -> Option<&'static KnownMessage> {
    let text = text.to_lowercase();
    TABLE.messages.iter().find(|row| {
        row.contains
            .iter()
            .all(|part| text.contains(&part.to_lowercase()))
    })
}

#[cfg(test)]
mod tests {
    use super::{TABLE, explain_message};

    #[test]
    fn every_row_names_its_source_and_is_reachable() {
        for row in &TABLE.messages {
            assert!(TABLE.sources.contains_key(&row.source), "{}", row.id);
            let found = explain_message(&row.contains.join(" and ")).expect("its own row");
            assert_eq!(
                found.id, row.id,
                "{:?} is shadowed by another row",
                row.contains
            );
        }
    }

    #[test]
    fn messages_as_they_are_printed() {
        for (text, id) in [
            (
                "RuntimeError: The NVIDIA driver on your system is too old (found version 11040). Please update",
                "driver_too_old",
            ),
            (
                "torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device",
                "no_kernel_image",
            ),
            (
                "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 803: system has unsupported display driver / cuda driver combination",
                "driver_mismatch",
            ),
            (
                "Error 804: forward compatibility was attempted on non supported HW",
                "compat_on_unsupported_gpu",
            ),
            (
                "ImportError: /opt/venv/lib/libtorch_cuda.so: undefined symbol: ncclCommWindowRegister",
                "nccl_too_old",
            ),
            (
                "ImportError: /lib/x86_64-linux-gnu/libstdc++.so.6: version `GLIBCXX_3.4.32' not found (required by x.so)",
                "libstdcxx_too_old",
            ),
            (
                "ImportError: /lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.32' not found (required by flash_attn_2_cuda.so)",
                "glibc_too_old",
            ),
            (
                "OSError: libcudnn.so.9: cannot open shared object file: No such file or directory",
                "cudnn_not_found",
            ),
            (
                "ImportError: libfoo.so.1: cannot open shared object file: No such file or directory",
                "library_missing",
            ),
            (
                "ImportError: x.so: undefined symbol: _ZN3c104cuda9SetDeviceEi",
                "extension_abi",
            ),
        ] {
            assert_eq!(
                explain_message(text).map(|it| &it.id[..]),
                Some(id),
                "{text}"
            );
        }
        assert_eq!(
            explain_message("ModuleNotFoundError: No module named 'x'"),
            None
        );
    }
}
