//! A container image on the disk: a folder with its root file system or an OCI layout, or an OCI
//! archive.
//!
//! Nothing of it is run. Of an archive only the files that discovery reads are unpacked, into a
//! private folder that is removed afterwards: metadata, interpreters, and libraries of GPU
//! packages.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{BufReader, Read, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::Context as _;
use serde_json::Value;

use super::{Request, discover as discover_below};
use crate::probe::json::at;
use validator_core::facts::{EnvironmentFacts, Facts, Reading};

/// A metadata file larger than this is none.
const METADATA_BYTES: u64 = 16 << 20;
/// All that is unpacked of one image.
const UNPACKED_BYTES: u64 = 24 << 30;
/// As many links as the kernel follows on the way to one file.
// Source: path_resolution(7), 40.
const LINKS_MAXIMUM: u32 = 40;
/// Manifests and configurations are small.
const DOCUMENT_BYTES: u64 = 8 << 20;

/// Toolkits, libraries and Python environments of an image.
pub(crate) fn discover(path: &Path, named: Vec<String>) -> anyhow::Result<EnvironmentFacts> {
    let shown = path.display();
    let metadata = std::fs::metadata(path).with_context(|| format!("--image {shown}"))?;
    if metadata.is_dir() && !path.join("oci-layout").is_file() {
        anyhow::ensure!(
            path.join("usr").is_dir() || path.join("bin").is_dir() || path.join("opt").is_dir(),
            "--image {shown}: expected the folder of a root file system (with usr, bin or opt) or of an OCI layout (with oci-layout)"
        );
        let request = Request::of_image(&BTreeMap::new(), named);
        return Ok(without_starts(discover_below(
            Some(path.to_owned()),
            request,
        )));
    }
    let layout = Layout::open(path).with_context(|| format!("--image {shown}"))?;
    let image = layout.image().with_context(|| format!("--image {shown}"))?;
    let unpacked = UnpackFolder::new().context("a private folder for the image's files")?;
    let mut left = UNPACKED_BYTES;
    for layer in &image.layers {
        layout
            .unpack(layer, &unpacked.path, &mut left)
            .with_context(|| format!("--image {shown}: layer {}", layer.digest))?;
    }
    let request = Request::of_image(&image.variables, named);
    Ok(without_starts(discover_below(
        Some(unpacked.path.clone()),
        request,
    )))
}

fn without_starts(mut facts: EnvironmentFacts) -> EnvironmentFacts {
    for environment in &mut facts.pythons {
        environment.not_started = Some("images are judged on the disk and not started".to_owned());
        // The private folder is none of the image's.
        environment.named = false;
    }
    facts
}

/// Toolkits and compat packages that speak of the image and not of this machine.
pub(crate) fn hide_machine(facts: &mut Facts, image: &EnvironmentFacts) {
    facts.host.cuda_toolkits = Reading::Value(image.toolkits.clone());
    // The runtime decides whether the image's compat package is used; its own variables do by
    // LD_LIBRARY_PATH.
    facts.host.cuda_compat = Reading::Value(Vec::new());
}

/// A folder or an archive with blobs.
enum Layout {
    Folder(PathBuf),
    /// Where each file of the archive begins, and its size.
    Archive {
        path: PathBuf,
        files: BTreeMap<String, (u64, u64)>,
    },
}

struct Image {
    layers: Vec<Descriptor>,
    variables: BTreeMap<String, String>,
}

#[derive(Clone, Debug)]
struct Descriptor {
    digest: String,
    /// The blob's path within the layout.
    path: String,
}

impl Layout {
    fn open(path: &Path) -> anyhow::Result<Self> {
        if path.is_dir() {
            return Ok(Self::Folder(path.to_owned()));
        }
        let mut archive = tar::Archive::new(BufReader::new(File::open(path)?));
        let mut files = BTreeMap::new();
        let entries = archive
            .entries_with_seek()
            .context("expected an OCI archive, which is a tar file")?;
        for entry in entries {
            let entry = entry
                .context("expected an OCI archive, which is a tar file without compression")?;
            let name = entry
                .path()?
                .to_string_lossy()
                .trim_start_matches("./")
                .to_owned();
            files.insert(name, (entry.raw_file_position(), entry.size()));
        }
        Ok(Self::Archive {
            path: path.to_owned(),
            files,
        })
    }

    fn has(&self, name: &str) -> bool {
        match self {
            Self::Folder(folder) => folder.join(name).is_file(),
            Self::Archive { files, .. } => files.contains_key(name),
        }
    }

    fn reader(&self, name: &str) -> anyhow::Result<Box<dyn Read>> {
        match self {
            Self::Folder(folder) => {
                let file = File::open(folder.join(name))
                    .with_context(|| format!("file {name} of the layout"))?;
                Ok(Box::new(BufReader::new(file)))
            }
            Self::Archive { path, files } => {
                let (at, size) = files
                    .get(name)
                    .with_context(|| format!("file {name} is not in the archive"))?;
                let mut file = File::open(path)?;
                file.seek(SeekFrom::Start(*at))?;
                Ok(Box::new(BufReader::new(file.take(*size))))
            }
        }
    }

    fn document(&self, name: &str) -> anyhow::Result<Value> {
        let mut bytes = Vec::new();
        self.reader(name)?
            .take(DOCUMENT_BYTES)
            .read_to_end(&mut bytes)?;
        serde_json::from_slice(&bytes).with_context(|| format!("file {name} is not JSON"))
    }

    /// The image of an OCI layout (`index.json`) or of `docker save` (`manifest.json`).
    fn image(&self) -> anyhow::Result<Image> {
        if self.has("index.json") {
            return self.oci_image();
        }
        anyhow::ensure!(
            self.has("manifest.json"),
            "expected an OCI archive with index.json, or one of `docker save` with manifest.json"
        );
        let manifest = self.document("manifest.json")?;
        let image = at(&manifest, "/0");
        let configuration = at(image, "/Config")
            .as_str()
            .context("manifest.json names no Config")?;
        let layers = at(image, "/Layers")
            .as_array()
            .context("manifest.json names no Layers")?;
        let layers = layers
            .iter()
            .filter_map(Value::as_str)
            .map(|path| Descriptor {
                digest: path.to_owned(),
                path: path.to_owned(),
            });
        Ok(Image {
            layers: layers.collect(),
            variables: variables(&self.document(configuration)?),
        })
    }

    fn oci_image(&self) -> anyhow::Result<Image> {
        const NESTED_MAXIMUM: usize = 4;
        let mut document = self.document("index.json")?;
        for _ in 0..NESTED_MAXIMUM {
            let Some(manifests) = at(&document, "/manifests").as_array() else {
                break;
            };
            let chosen =
                choose(manifests).context("index.json names no image for this architecture")?;
            document = self.document(&blob(chosen)?)?;
        }
        let layers = at(&document, "/layers")
            .as_array()
            .context("the image's manifest names no layers")?;
        let layers: anyhow::Result<Vec<Descriptor>> = layers
            .iter()
            .map(|layer| {
                Ok(Descriptor {
                    digest: at(layer, "/digest").as_str().unwrap_or_default().to_owned(),
                    path: blob(layer)?,
                })
            })
            .collect();
        Ok(Image {
            layers: layers?,
            variables: variables(&self.document(&blob(at(&document, "/config"))?)?),
        })
    }

    fn unpack(&self, layer: &Descriptor, to: &Path, left: &mut u64) -> anyhow::Result<()> {
        let mut reader = BufReader::new(self.reader(&layer.path)?);
        let mut magic = [0; 4];
        let count = read_up_to(&mut reader, &mut magic)?;
        let begin = magic.get(..count).unwrap_or_default().to_vec();
        let whole = std::io::Cursor::new(begin).chain(reader);
        let plain: Box<dyn Read> = match magic {
            [0x1f, 0x8b, ..] => Box::new(flate2::read::MultiGzDecoder::new(whole)),
            [0x28, 0xb5, 0x2f, 0xfd] => Box::new(
                ruzstd::decoding::StreamingDecoder::new(whole)
                    .map_err(|error| anyhow::anyhow!("zstd: {error}"))?,
            ),
            _ => Box::new(whole),
        };
        let mut archive = tar::Archive::new(plain);
        for entry in archive.entries()? {
            unpack_entry(&mut entry?, to, left)?;
        }
        Ok(())
    }
}

fn read_up_to(reader: &mut impl Read, buffer: &mut [u8]) -> std::io::Result<usize> {
    let mut count = 0;
    while let Some(rest) = buffer.get_mut(count..).filter(|it| !it.is_empty()) {
        match reader.read(rest)? {
            0 => break,
            more => count += more,
        }
    }
    Ok(count)
}

/// The manifest for this processor, else the only one.
fn choose(manifests: &[Value]) -> Option<&Value> {
    let architecture = if cfg!(target_arch = "aarch64") {
        "arm64"
    } else {
        "amd64"
    };
    let is_of = |it: &&Value| at(it, "/platform/architecture").as_str() == Some(architecture);
    let unnamed = |it: &&Value| at(it, "/platform").is_null();
    manifests
        .iter()
        .find(is_of)
        .or_else(|| manifests.iter().find(unnamed))
}

/// `blobs/sha256/…` of a descriptor.
fn blob(descriptor: &Value) -> anyhow::Result<String> {
    let digest = at(descriptor, "/digest")
        .as_str()
        .context("a descriptor has no digest")?;
    let (algorithm, hash) = digest
        .split_once(':')
        .context("a digest has the form sha256:…")?;
    let is_plain = |it: &str| !it.is_empty() && it.bytes().all(|byte| byte.is_ascii_alphanumeric());
    anyhow::ensure!(
        is_plain(algorithm) && is_plain(hash),
        "digest {digest} has the wrong form"
    );
    Ok(format!("blobs/{algorithm}/{hash}"))
}

/// `Env` of an image's configuration.
fn variables(configuration: &Value) -> BTreeMap<String, String> {
    let list = at(configuration, "/config/Env").as_array();
    let pairs = list
        .into_iter()
        .flatten()
        .filter_map(|it| it.as_str()?.split_once('='));
    pairs
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

/// A path within the image, without `..` and without a root.
fn inside(path: &Path) -> Option<PathBuf> {
    let mut inside = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(part) => inside.push(part),
            Component::CurDir | Component::RootDir => {}
            Component::ParentDir | Component::Prefix(_) => return None,
        }
    }
    (!inside.as_os_str().is_empty()).then_some(inside)
}

fn unpack_entry(
    entry: &mut tar::Entry<'_, impl Read>,
    to: &Path,
    left: &mut u64,
) -> anyhow::Result<()> {
    let Some(path) = inside(&entry.path()?) else {
        return Ok(());
    };
    let name = path
        .file_name()
        .and_then(|it| it.to_str())
        .unwrap_or_default()
        .to_owned();
    // No link of the image is followed on the way to a file.
    let Some(parent) = real_parent(to, &path) else {
        return Ok(());
    };
    let target = parent.join(&name);
    if name == ".wh..wh..opq" {
        let _ = std::fs::remove_dir_all(&parent);
        return Ok(());
    }
    if let Some(removed) = name.strip_prefix(".wh.") {
        // `.wh...` is no whiteout of the folder above.
        if let Some(removed) = inside(Path::new(removed)) {
            remove(&parent.join(removed));
        }
        return Ok(());
    }
    let kind = entry.header().entry_type();
    if kind.is_dir() {
        if is_environment_folder(&path) {
            if std::fs::symlink_metadata(&target).is_ok_and(|it| !it.is_dir()) {
                remove(&target);
            }
            std::fs::create_dir_all(&target)?;
        }
        return Ok(());
    }
    if kind.is_symlink() {
        if let Some(link) = entry.link_name()? {
            remove(&target);
            std::fs::create_dir_all(&parent)?;
            std::os::unix::fs::symlink(link, &target)?;
        }
        return Ok(());
    }
    if kind.is_hard_link() {
        // A hard link within a layer: the same file by another name.
        let link = entry.link_name()?.and_then(|it| inside(&it));
        if let Some(source) = link.and_then(|it| Some(real_parent(to, &it)?.join(it.file_name()?)))
            && source.is_file()
        {
            remove(&target);
            std::fs::create_dir_all(&parent)?;
            std::fs::hard_link(source, &target)?;
        }
        return Ok(());
    }
    if kind.is_file() && is_large_library(&path, &name, entry.size()) {
        remove(&target);
        std::fs::create_dir_all(&parent)?;
        File::create_new(&target)?;
        return Ok(());
    }
    if !kind.is_file() || !is_read(&path, &name, entry.size()) {
        return Ok(());
    }
    *left = left
        .checked_sub(entry.size())
        .context("the files of GPU packages are larger than 24 GiB in all")?;
    remove(&target);
    std::fs::create_dir_all(&parent)?;
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&target)?;
    std::io::copy(entry, &mut file)?;
    file.flush()?;
    Ok(())
}

/// The folder of a file below `to`, with the image's links as they are meant below the image's
/// root. Every folder on the way is checked before the next: the kernel follows no link, which
/// may lead out of `to`.
fn real_parent(to: &Path, path: &Path) -> Option<PathBuf> {
    let mut links_left = LINKS_MAXIMUM;
    let mut left: VecDeque<OsString> = path.parent()?.iter().map(OsStr::to_owned).collect();
    let mut parent = PathBuf::new();
    while let Some(part) = left.pop_front() {
        parent.push(part);
        match std::fs::symlink_metadata(to.join(&parent)) {
            Ok(metadata) if metadata.is_dir() => {}
            // `lib` is a link to `usr/lib` in many images, and layers write below either name.
            Ok(metadata) if metadata.is_symlink() => {
                links_left = links_left.checked_sub(1)?;
                let link = std::fs::read_link(to.join(&parent)).ok()?;
                if link.is_absolute() {
                    parent.clear();
                } else {
                    parent.pop();
                }
                for part in inside(&link)?.iter().rev() {
                    left.push_front(part.to_owned());
                }
            }
            Ok(_) => return None,
            Err(_) => {}
        }
    }
    Some(to.join(parent))
}

fn remove(path: &Path) {
    match std::fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => drop(std::fs::remove_dir_all(path)),
        Ok(_) => drop(std::fs::remove_file(path)),
        Err(_) => {}
    }
}

/// Folders whose existence is evidence.
fn is_environment_folder(path: &Path) -> bool {
    let name = path
        .file_name()
        .and_then(|it| it.to_str())
        .unwrap_or_default();
    [
        "conda-meta",
        "site-packages",
        "dist-packages",
        "torch",
        "jax",
        "tensorflow",
        "cupy",
        "usr",
        "opt",
        "bin",
    ]
    .contains(&name)
}

/// A large library of the system, of which only its being there is known: an empty file stands for
/// it.
fn is_large_library(path: &Path, name: &str, size: u64) -> bool {
    let is_library =
        Path::new(name).extension().is_some_and(|it| it == "so") || name.contains(".so.");
    is_library && !path.to_string_lossy().contains("-packages/") && !is_read(path, name, size)
}

/// Whether discovery reads a file of the image.
fn is_read(path: &Path, name: &str, size: u64) -> bool {
    let text = path.to_string_lossy();
    let extension = Path::new(name).extension().and_then(|it| it.to_str());
    let is_library = extension == Some("so") || name.contains(".so.");
    if is_library {
        const OF_PACKAGES: [&str; 13] = [
            "torch/lib/",
            "torch/_C.",
            "jaxlib/",
            "cupy",
            ".libs/",
            "nvidia/",
            "jax_plugins/",
            "onnxruntime/capi/",
            "vllm/",
            "flash_attn",
            "bitsandbytes/",
            "tensorflow/",
            "/compat/",
        ];
        const STEMS: [&str; 7] = [
            "libcuda",
            "libnvidia-ml",
            "libcublas",
            "libcudnn",
            "libnccl",
            "libnvrtc",
            "libnvJitLink",
        ];
        // The C library and others that the packages' libraries need.
        let is_of_the_system = size <= METADATA_BYTES && !text.contains("-packages/");
        return is_of_the_system
            || OF_PACKAGES.iter().any(|it| text.contains(it))
            || STEMS.iter().any(|it| name.starts_with(it));
    }
    if size > METADATA_BYTES {
        return name.starts_with("python") && text.contains("bin/");
    }
    text.contains(".dist-info/")
        || text.contains(".egg-info")
        || text.contains("conda-meta/")
        || text.starts_with("etc/")
        || text.contains("kernels/")
        || extension == Some("pth")
        || [
            "pyvenv.cfg",
            "version.json",
            "version.txt",
            "cuda.h",
            "version.py",
            "build_info.py",
            "_wheel.json",
            "build_and_package_info.py",
            "environments.txt",
            "__init__.py",
            "nvcc",
        ]
        .contains(&name)
            && !(name == "__init__.py" && text.split('/').count() > 8)
        || (name.starts_with("python") && text.contains("bin/"))
}

/// Where an image's files are unpacked; removed at the end.
struct UnpackFolder {
    path: PathBuf,
}

impl UnpackFolder {
    fn new() -> std::io::Result<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("gpu-validator-image-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Self { path })
    }
}

impl Drop for UnpackFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    enum Entry<'e> {
        File(&'e str),
        Link(&'e str, &'e str),
    }

    /// Unpacks a layer into `image` in a scratch folder, beside which `host` lies with one file.
    fn unpacked(entries: &[Entry<'_>]) -> tempfile::TempDir {
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let (image, host) = (
            scratch.path().join("image"),
            scratch.path().join("host/below"),
        );
        std::fs::create_dir(&image).expect("a folder");
        std::fs::create_dir_all(&host).expect("a folder");
        std::fs::write(host.join("kept"), "kept").expect("a file");
        let mut left = UNPACKED_BYTES;
        for entry in entries {
            let mut header = [0_u8; 512];
            let (name, link, kind) = match entry {
                Entry::File(name) => (*name, "", tar::EntryType::Regular),
                Entry::Link(name, to) => (*name, *to, tar::EntryType::Symlink),
            };
            let host = host.parent().expect("a folder").display().to_string();
            let link = link.replace("HOST", &host);
            // Written by hand: the library refuses such names.
            header[..name.len()].copy_from_slice(name.as_bytes());
            header[157..157 + link.len()].copy_from_slice(link.as_bytes());
            let mut header = tar::Header::from_byte_slice(&header).clone();
            header.set_entry_type(kind);
            header.set_size(0);
            header.set_mode(0o644);
            header.set_cksum();
            let mut archive = header.as_bytes().to_vec();
            archive.extend([0; 1024]);
            let mut archive = tar::Archive::new(&archive[..]);
            for entry in archive.entries().expect("an archive") {
                unpack_entry(&mut entry.expect("an entry"), &image, &mut left).expect("unpacked");
            }
        }
        scratch
    }

    fn is_there(scratch: &tempfile::TempDir, path: &str) -> bool {
        scratch.path().join(path).exists()
    }

    #[test]
    fn links_lead_below_the_images_root() {
        for link in ["usr/lib", "/usr/lib", "./usr/lib"] {
            let scratch = unpacked(&[
                Entry::File("usr/lib/version.txt"),
                Entry::Link("lib", link),
                Entry::File("lib/pyvenv.cfg"),
            ]);
            assert!(is_there(&scratch, "image/usr/lib/pyvenv.cfg"), "{link}");
        }
    }

    #[test]
    fn no_chain_of_links_leads_out_of_the_image() {
        let scratch = unpacked(&[
            Entry::Link("b", "HOST"),
            Entry::Link("etc", "b/below"),
            Entry::File("etc/forged"),
            Entry::File("etc/.wh.kept"),
            Entry::Link("up", "../host/below"),
            Entry::File("up/version.txt"),
        ]);
        let names = std::fs::read_dir(scratch.path().join("host/below")).expect("a folder");
        let names: Vec<_> = names.map(|it| it.expect("an entry").file_name()).collect();
        assert_eq!(names, ["kept"]);
    }

    #[test]
    fn links_in_a_circle_end() {
        let scratch = unpacked(&[
            Entry::Link("a", "b"),
            Entry::Link("b", "a"),
            Entry::File("a/version.txt"),
        ]);
        assert!(is_there(&scratch, "host/below/kept"));
        assert!(!is_there(&scratch, "image/a/version.txt"));
    }

    #[test]
    fn a_whiteout_removes_nothing_above_its_folder() {
        let scratch = unpacked(&[
            Entry::File("version.txt"),
            Entry::File(".wh..."),
            Entry::File(".wh.."),
            Entry::File("etc/.wh..."),
        ]);
        assert!(is_there(&scratch, "host/below/kept"));
        assert!(is_there(&scratch, "image/version.txt"));
    }
}
