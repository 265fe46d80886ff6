//! What is run: the three small commands of one Debian root, and five builds with their tests.

/// A command in a root file system made of layers.
#[derive(Debug)]
pub(crate) struct Workload {
    /// Short name, as in `--workloads`.
    pub(crate) name: &'static str,
    /// Trees of the corpus, lowest first.
    pub(crate) trees: &'static [&'static str],
    /// Whether the root must be writable, with `/proc` mounted.
    pub(crate) writes: bool,
    /// The line that `sh -c` runs, by chroot.
    pub(crate) command: &'static str,
    /// What it is, for the report.
    pub(crate) what: &'static str,
}

const BUILD: &str = "exec /workspace/run.sh";

/// All workloads. The first three are those that the other systems were measured with.
pub(crate) const ALL: [Workload; 8] = [
    Workload {
        name: "W1",
        trees: &["base-small"],
        writes: false,
        command: r#"exec python3 -c "import numpy, json, ssl, sqlite3; print(numpy.arange(5).sum())""#,
        what: "python3 imports numpy, json, ssl, sqlite3",
    },
    Workload {
        name: "W2",
        trees: &["base-small"],
        writes: false,
        command: r#"find / -xdev -printf "%s\n" | wc -l"#,
        what: "find over all inodes",
    },
    Workload {
        name: "W3",
        trees: &["base-small"],
        writes: false,
        command: "grep -r --include=*.py import /usr/lib/python3 | wc -l",
        what: "grep through the Python library",
    },
    Workload {
        name: "gcc",
        trees: &["base-gcc", "workspace-gcc", "toolkit-tools"],
        writes: true,
        command: BUILD,
        what: "zlib: configure, make, make test",
    },
    Workload {
        name: "go",
        trees: &["base-go", "workspace-go", "toolkit-tools"],
        writes: true,
        command: BUILD,
        what: "yaml.v3 and pflag: go build, go test",
    },
    Workload {
        name: "jdk",
        trees: &["base-jdk", "workspace-jdk", "toolkit-tools"],
        writes: true,
        command: BUILD,
        what: "commons-codec: javac, jar, JUnit",
    },
    Workload {
        name: "node",
        trees: &["base-node", "workspace-node", "toolkit-tools"],
        writes: true,
        command: BUILD,
        what: "qs: browserify, eslint, tape",
    },
    Workload {
        name: "python",
        trees: &["base-python", "workspace-python", "toolkit-tools"],
        writes: true,
        command: BUILD,
        what: "click: wheel, pytest",
    },
];

/// Workloads by name; all where `names` is empty, the first three where only the small root is wanted.
///
/// # Errors
/// A text that names the known ones, where a name is not known.
pub(crate) fn select(names: &[String], small: bool) -> Result<Vec<&'static Workload>, String> {
    let known = || {
        ALL.iter()
            .map(|workload| workload.name)
            .collect::<Vec<_>>()
            .join(", ")
    };
    if names.is_empty() {
        return Ok(ALL
            .iter()
            .filter(|workload| !small || !workload.writes)
            .collect());
    }
    let find = |name: &String| {
        ALL.iter()
            .find(|workload| workload.name.eq_ignore_ascii_case(name))
            .ok_or_else(|| format!("`{name}` is not a workload: expected one of {}", known()))
    };
    names.iter().map(find).collect()
}
