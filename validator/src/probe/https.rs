//! The one way to an HTTP client, since reqwest has no cryptography of its own here.

use std::sync::Once;

/// A builder of clients that speak TLS with ring. Without the provider that is installed here,
/// building one panics.
pub(crate) fn client_builder() -> reqwest::blocking::ClientBuilder {
    static PROVIDER: Once = Once::new();
    PROVIDER.call_once(|| {
        // The provider of a program that links this library serves as well.
        let _ = rustls::crypto::ring::default_provider().install_default();
    });
    reqwest::blocking::Client::builder()
}
