//! What `doctor` looks at, beside Slurm: the site file, the node's devices, NCCL's and
//! CUDA's libraries, directories, limits, enroot's configuration. Nothing is judged here.

use std::path::Path;
use std::time::Duration;

use palingenesis::config::Plugstack;
use palingenesis::config::site::{self, SITE_FILE, Site, SiteError};
use palingenesis::facts::cuda::{self, Libraries};
use palingenesis::facts::directories::{self, FileSystem, Request};
use palingenesis::facts::topology::NicKind;
use palingenesis::facts::{Environment, NodeFacts, User};
use palingenesis::system::limits::{self, Resource};
use palingenesis::system::{child, program};

use crate::slurm::Host;
use crate::slurm::release::Release;
use crate::slurm::tree::Tree;

/// All of it.
#[derive(Debug, Clone)]
pub struct Facts {
    /// Slurm.
    pub host: Host,
    /// The site file.
    pub site: SiteFile,
    /// The node's devices.
    pub node: Devices,
    /// Libraries that a training may load, those that are found.
    pub libraries: Vec<Found>,
    /// Those that palingenesis-worker would take on a GPU.
    pub worker: Libraries,
    /// Directories that the site file names, and what stands for them where it names none.
    pub directories: Vec<Folder>,
    /// Soft and hard limits of this process: locked memory, open files.
    pub memlock: Option<(u64, u64)>,
    /// See `memlock`.
    pub open_files: Option<(u64, u64)>,
    /// enroot.conf, where enroot or pyxis is there.
    pub enroot: Option<Enroot>,
}

/// The site file as the plugin would read it.
#[derive(Debug, Clone, Default)]
pub struct SiteFile {
    /// Its name, and whether the line names it.
    pub file: String,
    /// See `file`.
    pub named: bool,
    /// Whether one is there.
    pub there: bool,
    /// What is wrong with it.
    pub fault: Option<SiteError>,
    /// What is understood but hardly meant.
    pub warnings: Vec<String>,
}

/// The node's devices.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Devices {
    /// Models with their number.
    pub gpus: Vec<(String, usize)>,
    /// NVIDIA's among them.
    pub nvidia: usize,
    /// The version of NVIDIA's kernel module.
    pub driver: Option<String>,
    /// RDMA devices and Slingshot cards: name, and whether a port of it is up.
    pub nics: Vec<(String, bool)>,
    /// What could not be read.
    pub unknown: Vec<String>,
}

/// A library and where it was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// libnccl.so.2.
    pub name: &'static str,
    /// The file, links followed: its name has the version.
    pub path: String,
    /// Where it was found: LD_LIBRARY_PATH, ld.so.cache, a usual directory.
    pub by: &'static str,
}

/// What a directory is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// `cache`.
    Cache,
    /// `local`.
    Local,
}

/// One directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Folder {
    /// What for.
    pub usage: Use,
    /// The value, as the site file has it.
    pub value: String,
    /// What was looked at: of `/shared/{user}/cache` the part before the user's.
    pub path: String,
    /// Whether the site file names it.
    pub of_site: bool,
    /// Its mode; the reason where it could not be looked at, `None` where it is not there.
    pub mode: Result<Option<u32>, String>,
    /// Its file system.
    pub file_system: Option<FileSystem>,
    /// Free bytes.
    pub free: Option<u64>,
}

/// enroot's configuration.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Enroot {
    /// The file, if one is there.
    pub file: Option<String>,
    /// What it sets of where images and containers go.
    pub paths: Vec<(String, String)>,
    /// Those on a file server.
    pub shared: Vec<String>,
    /// Whether enroot's own hook for PyTorch is in place.
    pub pytorch_hook: Option<String>,
}

/// How long a file server may take.
const PATIENCE: Duration = Duration::from_secs(5);

impl Facts {
    /// Looks at the machine below the tree's root.
    pub fn read(root: &Path, named: Option<Release>) -> Facts {
        let tree = Tree::new(root);
        let host = Host::read(&tree, named);
        let line = host.stack.as_ref().and_then(|stack| stack.ours().next());
        let arguments = line.map(|line| line.arguments.iter().map(String::as_str));
        let plugstack = arguments.and_then(|arguments| Plugstack::parse(arguments).ok()).unwrap_or_default();
        let (site, parsed) = site_file(&tree, plugstack.config.as_deref());
        let pyxis = host.stack.iter().flat_map(|stack| &stack.lines).any(|line| line.is_pyxis());
        let node = devices(root);
        Facts {
            directories: folders(parsed.as_ref(), &tree),
            libraries: libraries(&tree),
            worker: worker(&tree),
            memlock: limits::limit(Resource::LockedMemory),
            open_files: limits::limit(Resource::OpenFiles),
            enroot: enroot(&tree, pyxis),
            host,
            site,
            node,
        }
    }
}

fn site_file(tree: &Tree, named: Option<&str>) -> (SiteFile, Option<Site>) {
    let file = named.unwrap_or(SITE_FILE);
    let mut facts = SiteFile { file: file.into(), named: named.is_some(), ..SiteFile::default() };
    let here = tree.file(file).map_or_else(|_| file.to_string(), |path| path.to_string_lossy().into_owned());
    let found = match site::look(&here) {
        Ok(Some(found)) => found,
        Ok(None) => {
            facts.fault = named.map(SiteError::missing);
            return (facts, None);
        }
        Err(fault) => {
            (facts.there, facts.fault) = (true, Some(fault));
            return (facts, None);
        }
    };
    facts.there = true;
    facts.warnings.extend(found.hidden);
    match Site::parse(file, &found.text) {
        Ok(site) => {
            facts.warnings.extend(site.warnings().iter().cloned());
            facts.fault = found.trusted.err();
            (facts, Some(site))
        }
        Err(fault) => {
            facts.fault = Some(fault);
            (facts, None)
        }
    }
}

fn devices(root: &Path) -> Devices {
    use palingenesis::facts::topology::GpuVendor;
    let facts = NodeFacts::read(root);
    let mut devices =
        Devices { driver: facts.machine.driver.clone(), unknown: facts.unknown.clone(), ..Devices::default() };
    for gpu in &facts.topology.gpus {
        let nvidia = gpu.vendor == GpuVendor::Nvidia;
        devices.nvidia += usize::from(nvidia);
        let vendor = if nvidia { "NVIDIA GPU" } else { "AMD GPU" };
        let model = gpu.model.clone().unwrap_or_else(|| vendor.to_string());
        match devices.gpus.iter_mut().find(|(name, _)| *name == model) {
            Some((_, count)) => *count += 1,
            None => devices.gpus.push((model, 1)),
        }
    }
    for nic in &facts.topology.nics {
        let mut ports = facts.rdma.iter().flatten().filter(|port| port.device == nic.name);
        let up = match nic.kind {
            NicKind::Verbs => ports.any(|port| port.active && port.link_up),
            NicKind::Slingshot => nic.netdevs.iter().any(|netdev| netdev.up),
        };
        devices.nics.push((nic.name.clone(), up));
    }
    devices
}

/// What NCCL and CUDA are loaded by.
const WANTED: [&str; 4] = ["libcuda.so.1", "libcudart.so.12", "libcudart.so.13", "libnccl.so.2"];

/// Where packages and toolkits put them.
const USUAL: [&str; 8] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/local/cuda/lib64",
    "/usr/local/cuda/compat",
    "/usr/local/nvidia/lib64",
    "/usr/local/lib",
    "/opt/cuda/lib64",
];

fn libraries(tree: &Tree) -> Vec<Found> {
    let path = std::env::var("LD_LIBRARY_PATH").ok().filter(|_| tree.is_machine()).unwrap_or_default();
    let cache = if tree.is_machine() { ld_cache() } else { String::new() };
    let mut found = Vec::new();
    for name in WANTED {
        let named =
            path.split(':').filter(|dir| dir.starts_with('/')).map(|dir| (format!("{dir}/{name}"), "LD_LIBRARY_PATH"));
        let cached = cache.lines().filter_map(|line| line.trim().strip_prefix(name)?.split_once("=> "));
        let cached = cached.map(|(_, path)| (path.trim().to_string(), "ld.so.cache"));
        let usual = USUAL.iter().map(|dir| (format!("{dir}/{name}"), "a usual directory"));
        let there = |(path, _): &(String, &'static str)| tree.metadata(path).is_ok_and(|data| data.is_file());
        if let Some((path, by)) = named.chain(cached).chain(usual).find(there) {
            // The last name has the version.
            let last = match tree.link(&path) {
                Some(target) if !target.contains('/') => Path::new(&path).with_file_name(target),
                Some(target) if target.starts_with('/') => target.into(),
                _ => path.into(),
            };
            found.push(Found { name, path: last.to_string_lossy().into_owned(), by });
        }
    }
    found
}

fn worker(tree: &Tree) -> Libraries {
    // Of another machine's tree this process's variables say nothing.
    let environment = if tree.is_machine() { Environment::of_process() } else { Environment::default() };
    cuda::find(tree.root(), None, &environment)
}

/// What the loader finds without being told.
fn ld_cache() -> String {
    let ldconfig = ["/sbin/ldconfig", "/usr/sbin/ldconfig"].into_iter().map(Path::new).find(|path| path.is_file());
    let said = ldconfig.and_then(|ldconfig| program::output(ldconfig, &["-p"], &[], PATIENCE).ok());
    String::from_utf8_lossy(&said.unwrap_or_default()).into_owned()
}

/// Stands for the user in the site file's directories.
const SOMEBODY: (&str, u32) = ("somebody-of-doctor", 4_294_967_293);

fn folders(site: Option<&Site>, tree: &Tree) -> Vec<Folder> {
    if !tree.is_machine() {
        return Vec::new();
    }
    let user = User { name: Some(SOMEBODY.0.into()), uid: SOMEBODY.1 };
    let environment = Environment::of_process();
    let node = environment.get("SLURMD_NODENAME").map(String::from).or_else(super::host_name);
    let settings = site.map(|site| site.view(None, node.as_deref(), &user).settings).unwrap_or_default();
    let cache = settings.cache.map(|value| (Use::Cache, value, true));
    let local = settings.local.map_or((Use::Local, "/tmp".into(), false), |value| (Use::Local, value, true));
    [cache, Some(local)].into_iter().flatten().map(|(usage, value, of_site)| folder(usage, &value, of_site)).collect()
}

fn folder(usage: Use, value: &str, of_site: bool) -> Folder {
    let number = SOMEBODY.1.to_string();
    let shown = value.replace(SOMEBODY.0, "{user}").replace(&number, "{uid}");
    let mut path = String::new();
    for part in value.split('/').filter(|part| !part.is_empty()) {
        if part.contains(SOMEBODY.0) || part.contains(&number) {
            break;
        }
        path.push('/');
        path.push_str(part);
    }
    if path.is_empty() {
        path.push('/');
    }
    let asked = path.clone();
    let mode = child::run(PATIENCE, || {
        use std::os::unix::fs::MetadataExt;
        let said: Result<Option<u32>, String> = match std::fs::metadata(&asked) {
            Ok(data) if data.is_dir() => Ok(Some(data.mode() & 0o7777)),
            Ok(_) => Err("it is no directory".into()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(crate::slurm::tree::reason(&error)),
        };
        serde_json::to_vec(&said).unwrap_or_default()
    });
    let mode = mode.map_err(|error| error.to_string());
    let mode = mode.and_then(|said| serde_json::from_slice(&said).map_err(|error| error.to_string()));
    let mode: Result<Option<u32>, String> = mode.and_then(|said| said);
    let looked = match &mode {
        Ok(Some(_)) => directories::look(&[Request::given(&path)]).pop(),
        _ => None,
    };
    Folder {
        usage,
        value: shown,
        path,
        of_site,
        mode,
        file_system: looked.as_ref().and_then(|looked| looked.file_system.clone()),
        free: looked.and_then(|looked| looked.free),
    }
}

fn enroot(tree: &Tree, pyxis: bool) -> Option<Enroot> {
    let installed = ["/usr/bin/enroot", "/usr/local/bin/enroot"].iter().any(|path| tree.metadata(path).is_ok());
    let file = ["/etc/enroot/enroot.conf", "/usr/local/etc/enroot/enroot.conf"];
    let file = file.into_iter().find(|path| tree.metadata(path).is_ok());
    if !installed && !pyxis && file.is_none() {
        return None;
    }
    let mut enroot = Enroot { file: file.map(String::from), ..Enroot::default() };
    let text = file.and_then(|file| tree.bytes(file).ok()).unwrap_or_default();
    for line in String::from_utf8_lossy(&text).lines() {
        let line = line.trim();
        let name = line.split(|c: char| c.is_whitespace() || c == '=').next().unwrap_or_default();
        if ["ENROOT_RUNTIME_PATH", "ENROOT_CACHE_PATH", "ENROOT_DATA_PATH", "ENROOT_TEMP_PATH"].contains(&name) {
            let value = line[name.len()..].trim_start_matches([' ', '\t', '=']).trim_matches(['"', '\'']);
            enroot.paths.push((name.into(), value.into()));
        }
    }
    for (name, value) in enroot.paths.iter().filter(|_| tree.is_machine()) {
        let fixed = value.split('$').next().unwrap_or_default().trim_end_matches(|c| c != '/');
        let looked = Some(fixed).filter(|path| path.len() > 1).map(|path| directories::look(&[Request::given(path)]));
        let kind = looked.and_then(|mut looked| looked.pop()?.file_system);
        if kind.is_some_and(|kind| kind.place == directories::Place::Network) {
            enroot.shared.push(name.clone());
        }
    }
    let hooks = tree.names("/etc/enroot/hooks.d").unwrap_or_default();
    enroot.pytorch_hook =
        hooks.into_iter().find(|name| name.contains("pytorch")).map(|name| format!("/etc/enroot/hooks.d/{name}"));
    Some(enroot)
}
