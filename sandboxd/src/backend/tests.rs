//! Which backends there are, and what one that lacks a capability answers.

use super::*;
use crate::error::{ApiError, ErrorKind};

/// A backend that can do nothing but what every one must.
#[derive(Debug)]
struct Least(Kind);

impl Backend for Least {
    fn kind(&self) -> Kind {
        self.0
    }

    fn create(&self, _plan: &Plan<'_>) -> Result<Place, BackendError> {
        Ok(at(self.0))
    }

    fn lives(&self, place: &Place) -> bool {
        place.backend == self.0
    }

    fn door(&self, place: &Place) -> Door {
        Door::at(PathBuf::from(format!("/run/{}/{}", self.0, place.slot)))
    }

    fn resume(&self, _place: &Place) -> Result<(), BackendError> {
        Ok(())
    }

    fn kill(&self, _place: &Place) -> Result<(), BackendError> {
        Ok(())
    }

    fn close(&self) {}
}

fn at(backend: Kind) -> Place {
    Place {
        backend,
        slot: 7,
        pid: 1,
        started: 2,
    }
}

fn two() -> Backends {
    let mut all = Backends::default();
    all.add(Box::new(Least(Kind::Microvm)));
    all.add(Box::new(Least(Kind::Container)));
    all
}

/// Mutation: `choose` looks among `Kind::ALL` (a name without a backend is taken).
#[test]
fn a_request_gets_the_backend_it_names_or_is_told_which_there_are() {
    let all = two();
    assert_eq!(all.choose("container").unwrap(), Kind::Container);
    assert_eq!(all.choose("microvm").unwrap(), Kind::Microvm);
    for name in ["vm", "fncall", "Container", ""] {
        let refused = ApiError::from(all.choose(name).unwrap_err());
        assert_eq!(refused.kind, ErrorKind::Invalid);
        let expected = format!("backend `{name}` is not one of: container, microvm");
        assert_eq!(refused.message, expected);
    }
}

/// Mutations: `of` takes the first backend; a default method does nothing and says that it did.
#[test]
fn each_place_is_its_backends_and_what_that_cannot_do_is_refused() {
    let all = two();
    let place = at(Kind::Microvm);
    let backend = all.of(&place).unwrap();
    assert_eq!(backend.door(&place).socket(), Path::new("/run/microvm/7"));
    let refusals = [
        (backend.pause(&place), "be paused"),
        (backend.freeze(&place), "stand still to be copied"),
        (backend.usage(&place).map(drop), "tell what it uses"),
        (backend.network(&place).map(drop), "have a network"),
    ];
    for (refused, what) in refusals {
        let refused = ApiError::from(refused.unwrap_err());
        assert_eq!(refused.kind, ErrorKind::Refused);
        let expected = format!("a sandbox of the backend `microvm` cannot {what}");
        assert_eq!(refused.message, expected);
    }
    let refused = all.of(&at(Kind::Vm)).map(drop).unwrap_err();
    assert!(matches!(refused, BackendError::Unknown { .. }));
}

/// Mutation: without the default a record of an earlier version is no record.
#[test]
fn places_of_earlier_versions_are_containers() {
    let place: Place = serde_json::from_str(r#"{"slot":7,"pid":1,"started":2}"#).unwrap();
    assert_eq!(place, at(Kind::Container));
    for kind in Kind::ALL {
        let text = serde_json::to_string(&at(kind)).unwrap();
        assert!(text.contains(&format!(r#""backend":"{kind}""#)), "{text}");
        assert_eq!(serde_json::from_str::<Place>(&text).unwrap(), at(kind));
    }
}
