//! Variables that hold lists: two lists become one, key by key.

/// How a list is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kind {
    /// Between items.
    separator: char,
    /// Between an item's key and its value; `None`: the item is its own key.
    assigns: Option<char>,
}

const fn pairs(separator: char, assigns: char) -> Option<Kind> {
    Some(Kind { separator, assigns: Some(assigns) })
}

const fn elements(separator: char) -> Option<Kind> {
    Some(Kind { separator, assigns: None })
}

/// How `name` is merged, if its value is a list.
pub fn kind(name: &str) -> Option<Kind> {
    match name {
        "PYTORCH_ALLOC_CONF" | "PYTORCH_CUDA_ALLOC_CONF" | "PYTORCH_HIP_ALLOC_CONF" => pairs(',', ':'),
        "PET_RDZV_CONF" => pairs(',', '='),
        "XLA_FLAGS" => pairs(' ', '='),
        "no_proxy" | "NO_PROXY" => elements(','),
        "PATH" | "LD_LIBRARY_PATH" | "PYTHONPATH" => elements(':'),
        _ => None,
    }
}

/// The lists as one, the first one's keys winning; its own text stays as it is
/// and stands in front.
pub fn merge(kind: Kind, lists: &[&str]) -> String {
    let key = |item: &str| match kind.assigns {
        Some(assigns) => item.split(assigns).next().unwrap_or(item).trim().to_string(),
        None => item.trim().to_string(),
    };
    let mut merged = String::new();
    let mut keys: Vec<String> = Vec::new();
    for (index, list) in lists.iter().enumerate() {
        // Within one list a key may stand twice: that is its writer's business.
        let mut fresh = Vec::new();
        for item in list.split(kind.separator).filter(|item| !item.trim().is_empty()) {
            let key = key(item);
            if !keys.contains(&key) {
                if index > 0 {
                    if !merged.is_empty() {
                        merged.push(kind.separator);
                    }
                    merged.push_str(item.trim());
                }
                fresh.push(key);
            }
        }
        keys.extend(fresh);
        if index == 0 {
            merged.push_str(list.trim_end_matches([kind.separator, ' ']));
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_higher_list_s_keys_win() {
        let join = |name: &str, lists: &[&str]| merge(kind(name).unwrap(), lists);
        let alloc = "PYTORCH_CUDA_ALLOC_CONF";
        assert_eq!(join(alloc, &["expandable_segments:True"]), "expandable_segments:True");
        assert_eq!(
            join(alloc, &["max_split_size_mb:128", "expandable_segments:True"]),
            "max_split_size_mb:128,expandable_segments:True"
        );
        assert_eq!(
            join(alloc, &["expandable_segments:False", "expandable_segments:True"]),
            "expandable_segments:False"
        );
        assert_eq!(join(alloc, &["", "expandable_segments:True"]), "expandable_segments:True");
        assert_eq!(join(alloc, &["a:1,", "b:2"]), "a:1,b:2");
        assert_eq!(join("XLA_FLAGS", &["--a=1 --b", "--b --c=2"]), "--a=1 --b --c=2");
        assert_eq!(join("no_proxy", &["localhost,10.0.0.1", "n1,localhost"]), "localhost,10.0.0.1,n1");
        assert_eq!(join("PET_RDZV_CONF", &["is_host=1", "is_host=0,join_timeout=9"]), "is_host=1,join_timeout=9");
        assert_eq!(kind("NCCL_ALGO"), None);
    }
}
