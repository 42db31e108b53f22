//! TLS to an API server: openssl is the server, and serves the objects of the API as files.

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::node::{Node, Ran};

const NAME: &str = "gpu-node-1";

/// A node and the certificates of its cluster.
struct Cluster {
    node: Node,
}

/// A server that ends with the test.
struct Server {
    process: Child,
    port: u16,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn openssl(arguments: &[&str]) -> Command {
    let mut command = Command::new("openssl");
    command.args(arguments).stdin(Stdio::null());
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command
}

impl Cluster {
    fn new() -> Self {
        let node = Node::healthy("h200x1");
        let devices = json!({"nvidia.com/gpu": "1"});
        let object = json!({
            "metadata": {"name": NAME},
            "status": {"capacity": devices, "allocatable": devices},
        });
        let path = format!("api/v1/nodes/{NAME}");
        node.out.write(&path, object.to_string());
        let cluster = Self { node };
        cluster.authority("authority");
        cluster.authority("other");
        cluster.sign("server", "subjectAltName=IP:127.0.0.1", 1);
        cluster.sign("expired", "subjectAltName=IP:127.0.0.1", -1);
        cluster.sign("elsewhere", "subjectAltName=DNS:elsewhere.example", 1);
        cluster.sign("user", "extendedKeyUsage=clientAuth", 1);
        cluster
    }

    fn path(&self, name: &str) -> PathBuf {
        self.node.out.path(name)
    }

    fn openssl(&self, arguments: &[&str]) {
        let status = openssl(arguments).current_dir(self.path("")).status();
        let status = status.expect("openssl is installed");
        assert!(status.success(), "openssl {arguments:?}");
    }

    fn authority(&self, name: &str) {
        let (key, out) = (format!("{name}.key"), format!("{name}.crt"));
        let subject = format!("/CN={name}");
        let mut arguments = vec!["req", "-x509", "-days", "1", "-subj", &subject];
        arguments.extend(NEW_KEY);
        arguments.extend(["-keyout", &key, "-out", &out]);
        self.openssl(&arguments);
    }

    /// A certificate for so many days from now on; -1 for one that has expired.
    fn sign(&self, name: &str, extension: &str, days: i32) {
        let file = |kind: &str| format!("{name}.{kind}");
        self.node.out.write(&file("extensions"), extension);
        let (key, request, subject) = (file("key"), file("csr"), format!("/CN={name}"));
        let mut arguments = vec!["req", "-subj", &subject, "-keyout", &key, "-out", &request];
        arguments.extend(NEW_KEY);
        self.openssl(&arguments);
        let (days, extensions, out) = (days.to_string(), file("extensions"), file("crt"));
        self.openssl(&[
            "x509",
            "-req",
            "-days",
            &days,
            "-in",
            &request,
            "-extfile",
            &extensions,
            "-CA",
            "authority.crt",
            "-CAkey",
            "authority.key",
            "-out",
            &out,
        ]);
    }

    /// Serves with this certificate, with more options of openssl's.
    fn serve(&self, certificate: &str, more: &[&str]) -> Server {
        let port = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = port.local_addr().expect("an address").port();
        let (address, certificate, key) = (
            format!("127.0.0.1:{port}"),
            format!("{certificate}.crt"),
            format!("{certificate}.key"),
        );
        let mut arguments = vec!["s_server", "-quiet", "-WWW", "-accept", &address];
        arguments.extend(["-cert", &certificate, "-key", &key]);
        arguments.extend(more);
        let process = openssl(&arguments).current_dir(self.path("")).spawn();
        let server = Server {
            process: process.expect("openssl is installed"),
            port,
        };
        let start = Instant::now();
        while std::net::TcpStream::connect(&address).is_err() {
            assert!(start.elapsed() < Duration::from_secs(10), "it listens");
            std::thread::sleep(Duration::from_millis(20));
        }
        server
    }

    fn run(&self, server: &Server, authority: &str, user: &Value) -> Ran {
        let config = json!({
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
            "clusters": [{"name": "c", "cluster": {
                "server": format!("https://127.0.0.1:{}", server.port),
                "certificate-authority": format!("{authority}.crt"),
            }}],
            "users": [{"name": "c", "user": user}],
        });
        let config = self.node.out.write("kubeconfig", config.to_string());
        let profile = format!(
            "levels: {{standard: {{burn: {{enabled: false}}}}}}\nkubernetes: {{node_name: {NAME}, api: {{required: true, kubeconfig: {}}}}}\n",
            config.display()
        );
        let profile = self.node.out.write("profile.yaml", profile);
        let profile = profile.to_str().expect("UTF-8");
        self.node
            .run(&["--profile", profile, "--deadline-scale", "0.4"])
    }

    fn refused(&self, server: &Server, authority: &str, words: &str) {
        let ran = self.run(server, authority, &json!({"token": "t"}));
        let finding = ran.report.finding("node_capacity");
        assert_eq!(finding["verdict"], "error", "{finding}");
        assert_eq!(ran.code, 2);
        let summary = finding["summary"].to_string();
        assert!(summary.contains(words), "{summary}");
    }
}

const NEW_KEY: [&str; 5] = [
    "-newkey",
    "ec",
    "-pkeyopt",
    "ec_paramgen_curve:prime256v1",
    "-nodes",
];

#[test]
fn certificates_are_verified_on_both_sides() {
    let cluster = Cluster::new();
    let passes = |ran: &Ran| {
        let finding = ran.report.finding("node_capacity");
        assert_eq!(finding["verdict"], "pass", "{finding}");
    };
    let server = cluster.serve("server", &[]);
    passes(&cluster.run(&server, "authority", &json!({"token": "t"})));
    cluster.refused(&server, "other", "they are of another cluster");
    drop(server);
    let expired = cluster.serve("expired", &[]);
    cluster.refused(&expired, "authority", "is not valid at this time");
    drop(expired);
    let elsewhere = cluster.serve("elsewhere", &[]);
    cluster.refused(&elsewhere, "authority", "is for another host name");
    drop(elsewhere);
    // One that requires a client certificate.
    let asks = [
        "-Verify",
        "1",
        "-verify_return_error",
        "-CAfile",
        "authority.crt",
    ];
    let server = cluster.serve("server", &asks);
    let user = json!({"client-certificate": "user.crt", "client-key": "user.key"});
    passes(&cluster.run(&server, "authority", &user));
    cluster.refused(&server, "authority", "the connection broke");
}
