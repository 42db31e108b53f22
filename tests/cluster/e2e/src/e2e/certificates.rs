//! Certificates of the test's own, made by openssl: right ones, and one wrong in each way.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};

/// Elliptic keys: they are made in milliseconds.
const NEW_KEY: [&str; 5] = [
    "-newkey",
    "ec",
    "-pkeyopt",
    "ec_paramgen_curve:prime256v1",
    "-nodes",
];

/// A folder with certificates and their keys, `NAME.crt` and `NAME.key`.
#[derive(Debug)]
pub(super) struct Certificates {
    folder: PathBuf,
}

/// An authority that has signed everything else.
pub(super) const AUTHORITY: &str = "authority";
/// An authority that has signed nothing.
pub(super) const OTHER_AUTHORITY: &str = "other-authority";
/// What the API server and the kubelet show.
pub(super) const SERVER: &str = "server";
/// The same, for a time that has passed.
pub(super) const EXPIRED_SERVER: &str = "expired-server";

impl Certificates {
    pub(super) fn make(folder: PathBuf) -> anyhow::Result<Certificates> {
        std::fs::create_dir_all(&folder)
            .with_context(|| format!("{} cannot be made", folder.display()))?;
        let certificates = Certificates { folder };
        certificates.authority(AUTHORITY)?;
        certificates.authority(OTHER_AUTHORITY)?;
        let names = "subjectAltName=IP:127.0.0.1,DNS:localhost\nextendedKeyUsage=serverAuth\n";
        certificates.sign(SERVER, "/CN=server", names, 1)?;
        certificates.sign(EXPIRED_SERVER, "/CN=server", names, -1)?;
        Ok(certificates)
    }

    /// A user's certificate, valid for so many days from now on; -1 for one that has expired.
    pub(super) fn user(&self, name: &str, user: &str, days: i32) -> anyhow::Result<()> {
        let usage = "extendedKeyUsage=clientAuth\n";
        self.sign(name, &format!("/CN={user}"), usage, days)
    }

    pub(super) fn certificate(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{name}.crt"))
    }

    pub(super) fn key(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{name}.key"))
    }

    fn authority(&self, name: &str) -> anyhow::Result<()> {
        let mut command = Command::new("openssl");
        command.args(["req", "-x509", "-days", "1"]).args(NEW_KEY);
        command.arg("-keyout").arg(self.key(name));
        command.arg("-out").arg(self.certificate(name));
        run(command.args(["-subj", &format!("/CN={name}")]))
    }

    fn sign(&self, name: &str, subject: &str, extensions: &str, days: i32) -> anyhow::Result<()> {
        let request = self.folder.join(format!("{name}.csr"));
        let extension_file = self.folder.join(format!("{name}.extensions"));
        std::fs::write(&extension_file, extensions)?;
        let mut ask = Command::new("openssl");
        ask.arg("req").args(NEW_KEY);
        ask.arg("-keyout").arg(self.key(name));
        run(ask.arg("-out").arg(&request).args(["-subj", subject]))?;
        let mut sign = Command::new("openssl");
        sign.args(["x509", "-req", "-days", &days.to_string()]);
        sign.arg("-in").arg(&request);
        sign.arg("-CA").arg(self.certificate(AUTHORITY));
        sign.arg("-CAkey").arg(self.key(AUTHORITY));
        sign.arg("-extfile").arg(&extension_file);
        run(sign.arg("-out").arg(self.certificate(name)))
    }
}

/// An RSA key: the API server signs tokens of service accounts with it.
pub(super) fn make_key(path: &Path) -> anyhow::Result<()> {
    let mut command = Command::new("openssl");
    run(command.args(["genrsa", "-out"]).arg(path).arg("2048"))
}

fn run(command: &mut Command) -> anyhow::Result<()> {
    let output = command.output().context(
        "openssl does not start; install it (Debian and Ubuntu: apt-get install openssl)",
    )?;
    ensure!(
        output.status.success(),
        "openssl failed: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}
