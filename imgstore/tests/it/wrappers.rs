//! Origins that stand before others pass every call on: a provided method that is forgotten would go its default way in silence.

use std::collections::BTreeSet;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use imgstore::origin::counting::{CountingOrigin, Traffic};
use imgstore::origin::late::LateOrigin;
use imgstore::origin::{ByteRange, Created, ObjectInfo, Origin, OriginError};

const RANGE: ByteRange = ByteRange { start: 2, len: 3 };

/// Notes which of its methods are called. It overrides every one, and gives what no default gives.
#[derive(Debug, Default)]
struct Spy(Mutex<BTreeSet<&'static str>>);

impl Spy {
    fn note(&self, name: &'static str) {
        self.0.lock().unwrap().insert(name);
    }
}

impl Origin for Spy {
    fn address(&self) -> String {
        self.note("address");
        "spy:".to_owned()
    }
    fn fetch(&self, _: &str, _: ByteRange) -> Result<Vec<u8>, OriginError> {
        self.note("fetch");
        Ok(vec![1; 3])
    }
    fn check_size(&self, _: &str, _: u64) -> Result<(), OriginError> {
        self.note("check_size");
        Ok(())
    }
    fn fetch_of(&self, _: &str, _: u64, _: ByteRange) -> Result<Vec<u8>, OriginError> {
        self.note("fetch_of");
        Ok(vec![2; 3])
    }
    fn fetch_all(&self, _: &str, _: u64) -> Result<Vec<u8>, OriginError> {
        self.note("fetch_all");
        Ok(vec![3; 3])
    }
    fn fetch_within(&self, _: &str, _: ByteRange, _: Instant) -> Result<Vec<u8>, OriginError> {
        self.note("fetch_within");
        Ok(vec![4; 3])
    }
    fn fetch_all_within(&self, _: &str, _: u64, _: Instant) -> Result<Vec<u8>, OriginError> {
        self.note("fetch_all_within");
        Ok(vec![5; 3])
    }
    fn lag(&self) -> Duration {
        self.note("lag");
        Duration::from_secs(7)
    }
    fn create(&self, _: &str, _: &mut dyn Read) -> Result<Created, OriginError> {
        self.note("create");
        Ok(Created::New)
    }
    fn create_from_file(&self, _: &str, _: &Path) -> Result<Created, OriginError> {
        self.note("create_from_file");
        Ok(Created::Existed)
    }
    fn replace(&self, _: &str, _: &[u8]) -> Result<(), OriginError> {
        self.note("replace");
        Ok(())
    }
    fn replace_from_file(&self, _: &str, _: &Path) -> Result<(), OriginError> {
        self.note("replace_from_file");
        Ok(())
    }
    fn list(&self, _: &str) -> Result<Vec<String>, OriginError> {
        self.note("list");
        Ok(vec!["a".to_owned()])
    }
    fn size(&self, _: &str) -> Result<u64, OriginError> {
        self.note("size");
        Ok(8)
    }
    fn list_info(&self, _: &str) -> Result<Vec<ObjectInfo>, OriginError> {
        self.note("list_info");
        Ok(Vec::new())
    }
    fn remove(&self, _: &str) -> Result<(), OriginError> {
        self.note("remove");
        Ok(())
    }
    fn close(&self) {
        self.note("close");
    }
    fn chunk_bytes(&self) -> Option<u64> {
        self.note("chunk_bytes");
        Some(9)
    }
    fn staging(&self) -> Option<PathBuf> {
        self.note("staging");
        Some(PathBuf::from("/spy"))
    }
}

/// The methods of the trait, from its text.
fn methods() -> BTreeSet<&'static str> {
    let text = include_str!("../../src/origin.rs");
    let start = text.find("pub trait Origin").unwrap();
    let body = &text[start..];
    let body = &body[..body.find("\n}\n").unwrap()];
    let heads = body.lines().filter_map(|line| line.strip_prefix("    fn "));
    heads.map(|head| head.split('(').next().unwrap()).collect()
}

/// Calls everything once.
fn call_all(origin: &dyn Origin) {
    let late = Instant::now() + Duration::from_secs(60);
    let nowhere = Path::new("/nonexistent");
    assert_eq!(origin.fetch("o", RANGE).unwrap(), [1; 3]);
    assert_eq!(origin.address(), "spy:");
    origin.check_size("o", 1).unwrap();
    assert_eq!(origin.fetch_of("o", 10, RANGE).unwrap(), [2; 3]);
    assert_eq!(origin.fetch_all("o", 10).unwrap(), [3; 3]);
    assert_eq!(origin.fetch_within("o", RANGE, late).unwrap(), [4; 3]);
    assert_eq!(origin.fetch_all_within("o", 10, late).unwrap(), [5; 3]);
    assert_eq!(origin.lag(), Duration::from_secs(7));
    assert_eq!(origin.create("o", &mut &b""[..]).unwrap(), Created::New);
    let made = origin.create_from_file("o", nowhere).unwrap();
    assert_eq!(made, Created::Existed);
    origin.replace("o", b"").unwrap();
    origin.replace_from_file("o", nowhere).unwrap();
    assert_eq!(origin.list("").unwrap(), ["a"]);
    assert_eq!(origin.size("o").unwrap(), 8);
    assert_eq!(origin.list_info("").unwrap(), []);
    origin.remove("o").unwrap();
    assert_eq!(origin.chunk_bytes(), Some(9));
    assert_eq!(origin.staging().unwrap(), Path::new("/spy"));
    origin.close();
}

/// Turned red by: `fetch_within` taken out of `LateOrigin`; a method of the trait that the spy does not know has the same effect.
#[test]
fn every_method_of_the_trait_is_passed_on() {
    let methods = methods();
    assert_eq!(methods.len(), 19, "{methods:?}");
    let spy = Arc::new(Spy::default());
    call_all(spy.as_ref());
    assert_eq!(*spy.0.lock().unwrap(), methods, "the spy itself");
    let late = |spy: Arc<Spy>| -> Box<dyn Origin> {
        let open = move || Ok(Arc::clone(&spy) as Arc<dyn Origin>);
        Box::new(LateOrigin::opened_by("spy:".to_owned(), Box::new(open)))
    };
    let counting = |spy: Arc<Spy>| -> Box<dyn Origin> {
        let traffic = Arc::new(Traffic::default());
        Box::new(CountingOrigin::new(spy, traffic))
    };
    for (name, wrap) in [
        ("late", &late as &dyn Fn(Arc<Spy>) -> Box<dyn Origin>),
        ("counting", &counting),
    ] {
        let spy = Arc::new(Spy::default());
        call_all(&*wrap(Arc::clone(&spy)));
        let mut called = spy.0.lock().unwrap().clone();
        // The late one knows its address before it is open.
        called.insert("address");
        assert_eq!(called, methods, "{name}");
    }
}

/// Until it can be opened, every request says why; then it is opened once, and not after it was closed.
#[test]
fn a_late_origin_is_opened_by_the_first_request_that_can() {
    let tries = Arc::new(Mutex::new(0));
    let counted = Arc::clone(&tries);
    let open = move || {
        let mut tries = counted.lock().unwrap();
        *tries += 1;
        if *tries < 3 {
            return Err(OriginError::Unavailable {
                origin: "late:".to_owned(),
                object: String::new(),
                reason: "not mounted".to_owned(),
            });
        }
        Ok(Arc::new(Spy::default()) as Arc<dyn Origin>)
    };
    let origin = LateOrigin::opened_by("late:".to_owned(), Box::new(open));
    assert_eq!(origin.address(), "late:");
    assert_eq!(origin.lag(), Duration::ZERO);
    for _ in 0..2 {
        let error = origin.fetch("o", RANGE).unwrap_err().to_string();
        assert!(error.contains("not mounted"), "{error}");
    }
    for _ in 0..3 {
        assert_eq!(origin.fetch("o", RANGE).unwrap(), [1; 3]);
    }
    assert_eq!(*tries.lock().unwrap(), 3);
    let unopened = LateOrigin::opened_by("late:".to_owned(), Box::new(|| unreachable!()));
    unopened.close();
    let error = unopened.size("o").unwrap_err().to_string();
    assert!(error.contains("closed"), "{error}");
}
