//! The log by itself: order, repetition, crashes.

use super::*;
use serde_json::json;

fn asked(path: &str) -> Asked {
    Asked {
        method: "POST".to_owned(),
        path: path.to_owned(),
        body: None,
    }
}

fn new(begun: Result<Begun, TrajectoryError>) -> Ticket {
    match begun {
        Ok(Begun::New(ticket)) => ticket,
        other => panic!("{other:?}"),
    }
}

/// Mutation: without the index entry in `begin`, the second `begin` is new again.
#[test]
fn a_request_is_new_once_and_then_known() {
    let folder = tempfile::tempdir().unwrap();
    let log = Trajectory::open(&folder.path().join("db"), &folder.path().join("up")).unwrap();
    let ticket = new(log.begin("sb", "r", asked("/a")));
    assert!(matches!(
        log.begin("sb", "r", asked("/a")),
        Ok(Begun::Running(_))
    ));
    assert!(matches!(
        log.begin("sb", "r", asked("/b")),
        Err(TrajectoryError::Differs { .. })
    ));
    let upload = Upload {
        bytes: 3,
        digest: "d".to_owned(),
        kept: true,
    };
    let body = Some((upload, Came::Bytes(b"abc".to_vec())));
    let finished = log.finish(&ticket, (Outcome::Done, 200, json!({"x": 1})), body);
    let finished = finished.unwrap();
    match log.begin("sb", "r", asked("/a")) {
        Ok(Begun::Done(again)) => assert_eq!(again, finished),
        other => panic!("{other:?}"),
    }
    assert_eq!(
        log.body("sb", 1).unwrap(),
        Some(Kept::Bytes(b"abc".to_vec()))
    );
    // Another sandbox's is another; so is one whose name only begins alike.
    new(log.begin("sb2", "r", asked("/a")));
    log.forget("sb").unwrap();
    assert_eq!(log.events("sb", 0, 10).unwrap(), (vec![], None));
    assert_eq!(log.events("sb2", 0, 10).unwrap().0.len(), 1);
    new(log.begin("sb", "r", asked("/a")));
    for bad in ["", "a\nb", &"x".repeat(257)] {
        assert!(matches!(
            log.begin("sb", bad, asked("/a")),
            Err(TrajectoryError::BadId { .. })
        ));
    }
}

/// Mutation: if `open_requests` looked at results only, nothing would be found after reopening.
#[test]
fn what_a_crash_left_without_a_result_is_known_to_be_that() {
    let folder = tempfile::tempdir().unwrap();
    {
        let log = Trajectory::open(&folder.path().join("db"), &folder.path().join("up")).unwrap();
        let one = new(log.begin("sb", "one", asked("/1")));
        new(log.begin("sb", "two", asked("/2")));
        log.finish(&one, (Outcome::Done, 204, json!(null)), None)
            .unwrap();
    }
    let log = Trajectory::open(&folder.path().join("db"), &folder.path().join("up")).unwrap();
    let open = log.open_requests("sb").unwrap();
    assert_eq!(open.len(), 1);
    assert_eq!((&*open[0].0.request_id, open[0].0.seq), ("two", 2));
    let Ok(Begun::Open(ticket)) = log.begin("sb", "two", asked("/2")) else {
        panic!("it is open");
    };
    log.finish(&ticket, (Outcome::Unknown, 409, json!({})), None)
        .unwrap();
    match log.begin("sb", "two", asked("/2")) {
        Ok(Begun::Done(finished)) => assert_eq!(finished.outcome, Outcome::Unknown),
        other => panic!("{other:?}"),
    }
    let (events, next) = log.events("sb", 0, 100).unwrap();
    let order: Vec<u64> = events.iter().map(|event| event.seq).collect();
    assert_eq!((order, next), (vec![1, 2, 3, 4], None));
    assert_eq!(log.events("sb", 2, 2).unwrap().1, Some(4));
    assert_eq!(log.sandboxes().unwrap(), ["sb"]);
}

/// Mutation: with the index kept for what was not done, the second `begin` is not new.
#[test]
fn what_was_not_done_may_be_asked_again() {
    let folder = tempfile::tempdir().unwrap();
    let log = Trajectory::open(&folder.path().join("db"), &folder.path().join("up")).unwrap();
    let ticket = new(log.begin("sb", "r", asked("/a")));
    let Ok(Begun::Running(waiter)) = log.begin("sb", "r", asked("/a")) else {
        panic!("it runs");
    };
    log.finish(&ticket, (Outcome::NotDone, 503, json!({})), None)
        .unwrap();
    assert!(waiter.has_changed().is_err(), "whoever waits is told");
    assert!(log.open_requests("sb").unwrap().is_empty());
    let ticket = new(log.begin("sb", "r", asked("/a")));
    assert_eq!(ticket.seq, 3);
    log.leave_open(&ticket);
    assert!(matches!(
        log.begin("sb", "r", asked("/a")),
        Ok(Begun::Open(_))
    ));
}
