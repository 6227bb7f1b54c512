//! The GPUs that a task can use, in the order in which CUDA numbers them.
//!
//! CUDA counts the GPUs that the task may open, takes CUDA_VISIBLE_DEVICES for
//! numbers among those, and stops at the first entry that is none; PyTorch's
//! `torch.cuda._parse_visible_devices` does the same without CUDA
//! (<https://github.com/pytorch/pytorch/pull/92315>).

use crate::config::{Settings, printable};
use crate::facts::PciAddress;
use crate::facts::topology::{Gpu, GpuVendor};

use super::super::marks::Marks;
use super::super::{Facts, precedence};

/// The variable.
pub const LIST: &str = "CUDA_VISIBLE_DEVICES";
const ORDER: &str = "CUDA_DEVICE_ORDER";

/// An entry of CUDA_VISIBLE_DEVICES.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry<'a> {
    /// A number among the GPUs that the task may open.
    Index(usize),
    /// `GPU-` and the beginning of a UUID.
    Uuid(&'a str),
    /// Part of a GPU: `MIG-GPU-UUID/instance/instance`, or `MIG-` and a UUID of its own.
    Mig(&'a str),
}

/// The list as CUDA reads it: up to the first entry that is none or of another
/// kind than the first, and none at all where one stands twice. Of MIG devices
/// CUDA shows one process the first only.
pub fn entries(list: &str) -> Vec<Entry<'_>> {
    let mut found: Vec<Entry> = Vec::new();
    for text in list.split(',').map(str::trim).take(MOST_ENTRIES) {
        let entry = match entry(text) {
            Some(entry) if found.first().is_none_or(|first| same_kind(*first, entry)) => entry,
            _ => break,
        };
        if matches!(entry, Entry::Mig(_)) {
            return vec![entry];
        }
        if found.contains(&entry) {
            return Vec::new();
        }
        found.push(entry);
    }
    found
}

/// More GPUs than any node has; a variable may be megabytes long.
const MOST_ENTRIES: usize = 1024;

fn entry(text: &str) -> Option<Entry<'_>> {
    if text.starts_with("GPU-") {
        return Some(Entry::Uuid(text));
    }
    if text.starts_with("MIG-") {
        return Some(Entry::Mig(text));
    }
    // As strtoul reads it: what follows the digits does not count.
    let digits = text.strip_prefix('+').unwrap_or(text);
    let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
    digits[..end].parse().ok().map(Entry::Index)
}

fn same_kind(one: Entry, other: Entry) -> bool {
    std::mem::discriminant(&one) == std::mem::discriminant(&other)
}

/// CUDA_VISIBLE_DEVICES as the task will have it, if it is set. One that an outer
/// step of ours left is removed, see `precedence`.
pub fn list<'a>(facts: &Facts<'a>) -> Option<&'a str> {
    let marks = Marks::of(facts.environment);
    let kept =
        |_: &&str| !marks.ours(facts.environment, LIST) || marks.of_this_step(facts.environment, facts.step, LIST);
    facts.environment.get(LIST).filter(kept)
}

/// CUDA_DEVICE_ORDER as the task will have it. The profile sets it unless
/// somebody else does.
fn order(facts: &Facts, settings: &Settings) -> String {
    let profile = settings.site_profile.as_ref().and_then(|name| facts.site?.profiles.get(name));
    let of_site = || {
        let sites = facts.site.iter().flat_map(|site| &site.env);
        sites.chain(profile.iter().flat_map(|profile| &profile.env)).filter(|variable| variable.name == ORDER)
    };
    let given = || precedence::given(facts, &Marks::of(facts.environment), ORDER).map(|(value, _)| value);
    let forced = of_site().find(|variable| variable.force).map(|variable| variable.value.clone());
    forced
        .or_else(given)
        .or_else(|| of_site().next().map(|variable| variable.value.clone()))
        .unwrap_or_else(|| "PCI_BUS_ID".into())
}

/// The task's GPUs as indexes of the node's; none where CUDA shows none.
///
/// # Errors
/// Why they are not known, in words that follow "not bound: ".
pub fn visible(facts: &Facts, settings: &Settings) -> Result<Vec<usize>, String> {
    shown(&facts.node.topology.gpus, &facts.task.gpus_hidden, list(facts), Some(&order(facts, settings)))
}

/// What CUDA shows of a node's `gpus` with these values of the two variables.
///
/// # Errors
/// See [`visible`].
pub fn shown(
    gpus: &[Gpu],
    hidden: &[PciAddress],
    list: Option<&str>,
    order: Option<&str>,
) -> Result<Vec<usize>, String> {
    let of_nvidia = |gpu: &Gpu| gpu.vendor == GpuVendor::Nvidia;
    if !gpus.iter().any(of_nvidia) {
        return Err(match gpus.first() {
            Some(_) => "AMD GPUs are listed, not bound".into(),
            None => "no GPU is known on this node".into(),
        });
    }
    let may_open = |gpu: &Gpu| of_nvidia(gpu) && !hidden.contains(&gpu.place.address);
    let open: Vec<usize> = (0..gpus.len()).filter(|index| may_open(&gpus[*index])).collect();
    let Some(list) = list else {
        return in_order(gpus, &open, order).map(|()| open);
    };
    let entries = entries(list);
    match entries.first() {
        None => Ok(Vec::new()),
        Some(Entry::Index(_)) => {
            in_order(gpus, &open, order)?;
            let of = |entry: &Entry| match entry {
                Entry::Index(index) => open.get(*index).copied(),
                _ => None,
            };
            Ok(entries.iter().map_while(of).collect())
        }
        Some(Entry::Uuid(_)) => by_uuid(gpus, &open, &entries),
        Some(Entry::Mig(name)) => match (name.strip_prefix("MIG-GPU-"), open.as_slice()) {
            (Some(rest), _) => {
                let uuid = format!("GPU-{}", rest.split('/').next().unwrap_or(rest));
                by_uuid(gpus, &open, &[Entry::Uuid(&uuid)])
            }
            (None, [only]) => Ok(vec![*only]),
            (None, []) => Ok(Vec::new()),
            _ => Err(format!("{LIST}={} is a part of a GPU, and sysfs does not tell of which", printable(list))),
        },
    }
}

/// Whether CUDA's numbers follow PCI addresses, as the node's list does.
fn in_order(gpus: &[Gpu], open: &[usize], order: Option<&str>) -> Result<(), String> {
    if order == Some("PCI_BUS_ID") || open.len() < 2 {
        return Ok(());
    }
    let mut models = open.iter().map(|index| gpus[*index].model.as_deref());
    let first = models.next().flatten();
    if first.is_some() && models.all(|model| model == first) {
        return Ok(());
    }
    let order = order.map_or(format!("{ORDER} is not set"), |order| format!("{ORDER}={}", printable(order)));
    Err(format!("{order} and the GPUs are of several models: CUDA counts the fastest first, which only CUDA knows"))
}

/// A UUID may be cut short, as long as one GPU fits only.
fn by_uuid(gpus: &[Gpu], open: &[usize], entries: &[Entry]) -> Result<Vec<usize>, String> {
    let mut found: Vec<usize> = Vec::new();
    for entry in entries {
        let Entry::Uuid(wanted) = entry else { break };
        let fits = |index: &&usize| {
            let uuid = gpus[**index].uuid.as_deref();
            uuid.is_some_and(|uuid| uuid.get(..wanted.len()).is_some_and(|start| start.eq_ignore_ascii_case(wanted)))
        };
        let mut fitting = open.iter().filter(fits);
        let first = fitting.next().copied();
        let unknown = || open.iter().any(|index| gpus[*index].uuid.is_none());
        match first {
            // One whose UUID is not known may be meant, or fit too.
            _ if unknown() && (first.is_none() || wanted.len() < WHOLE_UUID) => {
                return Err(format!("the driver does not tell the UUIDs that {} could be", printable(wanted)));
            }
            Some(index) if fitting.next().is_none() => {
                if found.contains(&index) {
                    return Ok(Vec::new());
                }
                found.push(index);
            }
            _ => break,
        }
    }
    Ok(found)
}

/// `GPU-` and 36 characters.
const WHOLE_UUID: usize = 40;

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::facts::pci::Place;

    /// GPUs at these addresses, each with its model and its UUID; none for "".
    pub(crate) fn gpus(list: &[(&str, &str, &str)]) -> Vec<Gpu> {
        let given = |text: &str| (!text.is_empty()).then(|| text.to_string());
        let gpu = |(number, (address, model, uuid)): (usize, &(&str, &str, &str))| Gpu {
            vendor: GpuVendor::Nvidia,
            place: Place::of(PciAddress::parse(address).unwrap()),
            model: given(model),
            uuid: given(uuid),
            minor: Some(number as u32),
            memory_node: None,
        };
        list.iter().enumerate().map(gpu).collect()
    }

    const H100: &str = "NVIDIA H100 80GB HBM3";
    const FOUR: [(&str, &str, &str); 4] = [
        ("0000:07:00.0", H100, "GPU-aaaa1111-0000-0000-0000-000000000000"),
        ("0000:0b:00.0", H100, "GPU-bbbb2222-0000-0000-0000-000000000000"),
        ("0000:8a:00.0", H100, "GPU-bbbb3333-0000-0000-0000-000000000000"),
        ("0000:91:00.0", H100, "GPU-cccc4444-0000-0000-0000-000000000000"),
    ];

    fn of_four(list: &str) -> Result<Vec<usize>, String> {
        shown(&gpus(&FOUR), &[], (list != "unset").then_some(list), Some("PCI_BUS_ID"))
    }

    /// <https://github.com/pytorch/pytorch/pull/92315>, whose rules these are, and
    /// CUDA's guide on environment variables.
    #[test]
    fn the_list_is_read_as_cuda_reads_it() {
        let table: &[(&str, &[usize])] = &[
            ("unset", &[0, 1, 2, 3]),
            ("", &[]),
            ("-1", &[]),
            ("NoDevFiles", &[]),
            ("void", &[]),
            ("2", &[2]),
            ("3,1", &[3, 1]),
            (" 0 , 2 ", &[0, 2]),
            ("0,1,-1,2", &[0, 1]),
            ("0,,1", &[0]),
            ("0,9,1", &[0]),
            ("1gpu2,2ampere", &[1, 2]),
            ("0,0", &[]),
            ("1,01", &[]),
            ("99999999999999999999", &[]),
            ("GPU-bbbb2222-0000-0000-0000-000000000000", &[1]),
            ("GPU-cccc,GPU-aaaa", &[3, 0]),
            // Two GPUs fit.
            ("GPU-aaaa,GPU-bbbb", &[0]),
            ("GPU-bbbb", &[]),
            ("GPU-dddd", &[]),
            // The same one in two ways.
            ("GPU-aaaa,GPU-aaaa1111", &[]),
            // Of another kind than the first.
            ("GPU-aaaa,1", &[0]),
            ("1,GPU-aaaa", &[1]),
            ("MIG-GPU-bbbb3333-0000-0000-0000-000000000000/1/0", &[2]),
            ("MIG-GPU-bbbb3333-0000-0000-0000-000000000000/1/0,0", &[2]),
            ("MIG-GPU-dddd3333-0000-0000-0000-000000000000/1/0", &[]),
        ];
        for (list, expected) in table {
            assert_eq!(of_four(list), Ok(expected.to_vec()), "{list:?}");
        }
    }

    /// As long as the kernel lets a variable be at execve.
    #[test]
    fn a_list_of_any_length_is_read_in_no_time() {
        let numbers: Vec<String> = (0..30_000).map(|number| number.to_string()).collect();
        let uuids: Vec<String> = (0..10_000).map(|number| format!("GPU-{number:08x}")).collect();
        let start = std::time::Instant::now();
        assert_eq!(of_four(&numbers.join(",")), Ok(vec![0, 1, 2, 3]));
        assert_eq!(of_four(&uuids.join(",")), Ok(vec![]));
        assert_eq!(of_four(&",".repeat(128 << 10)), Ok(vec![]));
        assert!(start.elapsed() < std::time::Duration::from_secs(2), "{:?}", start.elapsed());
    }

    #[test]
    fn numbers_count_the_gpus_that_the_task_may_open() {
        let gpus = gpus(&FOUR);
        let hidden = [gpus[0].place.address, gpus[2].place.address];
        let of = |list| shown(&gpus, &hidden, list, Some("PCI_BUS_ID"));
        assert_eq!(of(None), Ok(vec![1, 3]));
        assert_eq!(of(Some("1,0")), Ok(vec![3, 1]));
        assert_eq!(of(Some("2")), Ok(vec![]));
        // A hidden one is no other's double, and is not found either.
        assert_eq!(of(Some("GPU-bbbb")), Ok(vec![1]));
        assert_eq!(of(Some("GPU-aaaa")), Ok(vec![]));
        let all: Vec<PciAddress> = gpus.iter().map(|gpu| gpu.place.address).collect();
        assert_eq!(shown(&gpus, &all, None, None), Ok(vec![]));
    }

    #[test]
    fn a_mig_device_is_its_gpu_s_where_that_is_known() {
        let name = "MIG-c7384736-a75d-5afc-978f-d2f1294409fd";
        assert!(of_four(name).unwrap_err().contains("a part of a GPU"));
        let gpus = gpus(&FOUR);
        let hidden: Vec<PciAddress> = gpus[1..].iter().map(|gpu| gpu.place.address).collect();
        assert_eq!(shown(&gpus, &hidden, Some(name), None), Ok(vec![0]));
    }

    /// Slurm's gres.conf page: numbers agree with PCI addresses by
    /// CUDA_DEVICE_ORDER=PCI_BUS_ID only (<https://slurm.schedmd.com/gres.html>).
    #[test]
    fn the_fastest_first_of_unlike_gpus_is_not_known() {
        let unlike = gpus(&[("0000:07:00.0", "Quadro P400", "GPU-aaaa"), ("0000:0b:00.0", H100, "GPU-bbbb")]);
        for order in [None, Some("FASTEST_FIRST"), Some("")] {
            for list in [None, Some("0"), Some("1,0")] {
                assert!(shown(&unlike, &[], list, order).unwrap_err().contains("several models"), "{order:?} {list:?}");
            }
            // Names need no order.
            assert_eq!(shown(&unlike, &[], Some("GPU-bbbb,GPU-aaaa"), order), Ok(vec![1, 0]));
            assert_eq!(shown(&unlike, &[unlike[0].place.address], Some("0"), order), Ok(vec![1]));
            assert_eq!(shown(&gpus(&FOUR), &[], Some("3"), order), Ok(vec![3]));
        }
        assert_eq!(shown(&unlike, &[], Some("1"), Some("PCI_BUS_ID")), Ok(vec![1]));
    }

    #[test]
    fn a_uuid_that_the_driver_does_not_tell_is_not_guessed() {
        let whole = "GPU-bbbb2222-0000-0000-0000-000000000000";
        let one_unknown = gpus(&[("0000:07:00.0", H100, ""), ("0000:0b:00.0", H100, whole)]);
        assert_eq!(shown(&one_unknown, &[], Some(whole), None), Ok(vec![1]));
        for list in ["GPU-bbbb", "GPU-aaaa", &format!("{whole},GPU-aaaa")] {
            assert!(shown(&one_unknown, &[], Some(list), None).unwrap_err().contains("UUIDs"), "{list}");
        }
    }

    #[test]
    fn amd_s_gpus_are_none_of_cuda_s() {
        let mut mixed = gpus(&FOUR);
        mixed[0].vendor = GpuVendor::Amd;
        assert_eq!(shown(&mixed, &[], None, None), Ok(vec![1, 2, 3]));
        mixed.iter_mut().for_each(|gpu| gpu.vendor = GpuVendor::Amd);
        assert_eq!(shown(&mixed, &[], None, None), Err("AMD GPUs are listed, not bound".into()));
        assert!(shown(&[], &[], None, None).is_err());
    }
}
