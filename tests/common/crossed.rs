//! A cluster for binding: nodes of two sockets with one core each, which this
//! machine's first two CPUs stand for, and two GPUs as their driver and sysfs
//! have them, each beside the other rank's CPU.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use super::{Said, Sandbox};

/// A GPU beside one CPU: its PCI address, the CPU, which is its NUMA node, too.
pub type Gpu = (&'static str, u32);

/// GPU 0 is beside CPU 1, which Slurm gives to rank 1, and the other way round.
pub const CROSSED: [Gpu; 2] = [("0000:01:00.0", 1), ("0000:81:00.0", 0)];
pub const STRAIGHT: [Gpu; 2] = [("0000:01:00.0", 0), ("0000:81:00.0", 1)];

/// The two masks, of rank 0 and of rank 1, as Slurm sets them with two CPUs on two
/// sockets, and exchanged.
pub const SLURM_S: [&str; 2] = ["0", "1"];
pub const EXCHANGED: [&str; 2] = ["1", "0"];

fn write(root: &Path, path: &str, text: &str) {
    let file = root.join(path);
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    fs::write(file, format!("{text}\n")).unwrap();
}

/// A machine of two NUMA nodes with a CPU each, as its kernel shows it.
pub fn machine(root: &Path, gpus: &[Gpu]) {
    let _ = fs::remove_dir_all(root);
    for (path, text) in [
        ("sys/devices/system/cpu/online", "0-1"),
        ("sys/devices/system/cpu/cpu0/topology/thread_siblings_list", "0"),
        ("sys/devices/system/cpu/cpu1/topology/thread_siblings_list", "1"),
        ("sys/devices/system/node/online", "0-1"),
        ("sys/devices/system/node/has_cpu", "0-1"),
        ("sys/devices/system/node/node0/cpulist", "0"),
        ("sys/devices/system/node/node0/distance", "10 21"),
        ("sys/devices/system/node/node1/cpulist", "1"),
        ("sys/devices/system/node/node1/distance", "21 10"),
    ] {
        write(root, path, text);
    }
    let links = root.join("sys/bus/pci/devices");
    fs::create_dir_all(&links).unwrap();
    for (minor, (address, cpu)) in gpus.iter().enumerate() {
        let information = format!(
            "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 99\nGPU UUID: \t \
             GPU-00000000-0000-0000-0000-00000000000{minor}\nBus Location: \t {address}\nDevice Minor: \t {minor}"
        );
        write(root, &format!("proc/driver/nvidia/gpus/{address}/information"), &information);
        let directory = format!("devices/pci{}/{}/{address}", &address[..7], address.replace(":00.0", ":01.0"));
        let sys = root.join("sys");
        for (name, text) in
            [("numa_node", cpu.to_string()), ("local_cpulist", cpu.to_string()), ("vendor", "0x10de".to_string())]
        {
            write(&sys, &format!("{directory}/{name}"), &text);
        }
        symlink(format!("../../../{directory}"), links.join(address)).unwrap();
    }
}

/// Two nodes of it.
pub struct Cluster {
    /// The cluster.
    pub sandbox: Sandbox,
    library: String,
}

impl Cluster {
    /// Two nodes of two sockets with a core and a GPU each; says why not on a
    /// machine with fewer CPUs.
    pub fn up(name: &str, gpus: &[Gpu], library: &Path, arguments: &[&str]) -> Option<Cluster> {
        if std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() < 2) {
            println!("skipped: one CPU only: there is nothing to exchange");
            return None;
        }
        let shape = ["--sockets", "2", "--cores", "1", "--gpus", "2"];
        let sandbox = Sandbox::up(&format!("binding-{name}"), &[&shape[..], arguments].concat())?;
        let cluster = Cluster { sandbox, library: library.display().to_string() };
        cluster.machine(gpus);
        cluster.load("");
        Some(cluster)
    }

    /// Another machine.
    pub fn machine(&self, gpus: &[Gpu]) {
        machine(&self.sandbox.dir().join("home/machine"), gpus);
    }

    /// Our plugin, with these arguments, and nothing else.
    pub fn load(&self, arguments: &str) {
        self.sandbox.plugstack(&[&self.line(arguments)]);
    }

    /// Our line of plugstack.conf.
    pub fn line(&self, arguments: &str) -> String {
        let root = self.sandbox.dir().join("home/machine");
        format!("optional {} root={} {arguments}", self.library, root.display())
    }

    /// Runs the line, in which TASK is a program that prints its rank, its CPUs and
    /// its memory policy, as the kernel lists both.
    pub fn try_run(&self, line: &str) -> Said {
        let task = self.sandbox.dir().join("home/task");
        if !task.exists() {
            let text = "#!/bin/sh\n\
                        cpus=$(sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' /proc/self/status)\n\
                        policy=$(sed -n '1s/^[0-9a-f]* //; 1s/ file=.*//p' /proc/self/numa_maps)\n\
                        echo \"$SLURM_PROCID|$cpus|$policy\"\n";
            fs::write(&task, text).unwrap();
            fs::set_permissions(&task, PermissionsExt::from_mode(0o755)).unwrap();
        }
        self.sandbox.run(&line.replace("TASK", &task.display().to_string()))
    }

    /// The same of a line that succeeds.
    #[track_caller]
    pub fn run(&self, line: &str) -> Ranks {
        let said = self.try_run(line);
        assert_eq!(said.code, 0, "{line}: {said:#?}");
        Ranks::of(said)
    }

    /// Two ranks on one node.
    #[track_caller]
    pub fn two(&self, environment: &str, options: &str) -> Ranks {
        self.run(&format!("{environment} srun -Q -N1 -n2 --gpus-per-node=2 {options} TASK"))
    }
}

/// What is told, but for a rank's having one CPU, as it must here.
pub fn told(text: &str) -> Vec<&str> {
    text.lines().filter(|line| line.contains("palingenesis: ") && !line.ends_with(" [cpus]")).collect()
}

/// What the ranks printed.
#[derive(Debug)]
pub struct Ranks {
    /// All that was said.
    pub said: Said,
    /// Their CPUs, as the kernel lists them.
    pub cpus: BTreeMap<u32, String>,
    /// Their memory policies.
    pub policies: BTreeMap<u32, String>,
}

impl Ranks {
    /// Those whose lines are in the output.
    pub fn of(said: Said) -> Ranks {
        let (mut cpus, mut policies) = (BTreeMap::new(), BTreeMap::new());
        for line in said.out.lines() {
            if let [rank, mask, policy] = line.split('|').collect::<Vec<_>>()[..] {
                let rank = rank.parse().unwrap();
                cpus.insert(rank, mask.to_string());
                policies.insert(rank, policy.to_string());
            }
        }
        Ranks { said, cpus, policies }
    }

    /// Asserts the CPUs of two ranks.
    #[track_caller]
    pub fn have(&self, cpus: [&str; 2], what: &str) {
        let found: Vec<&str> = self.cpus.values().map(String::as_str).collect();
        assert_eq!(found, cpus, "{what}: {:#?}", self.said);
    }

    /// Asserts that nothing was told.
    #[track_caller]
    pub fn are_quiet(self) -> Ranks {
        assert_eq!(told(&self.said.err), Vec::<&str>::new(), "{:#?}", self.said);
        self
    }
}
